"""The specification of a run, and the versions and the hardware that its numbers depend on."""

import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from grpo_jax.config import Config
from grpo_jax.environments import EnvParams
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.runs.settings import NAME, Setting, Settings, Value, grouped, setting_columns, settings_of

PACKAGES = ("grpo-jax", "jax", "jaxlib", "flax", "optax", "gymnax", "numpy")  # on which a result depends


class RunSpec(NamedTuple):
    """A run of `R` rows (seeds × hyperparameters) before it is made; between label and rows are arguments of `run`."""

    label: str | Mapping[str, Value]  # the run's name, or the values of the fields by which it differs from others
    config: Config
    hyperparams: Hyperparams  # each leaf scalar or [R]
    keys: jax.Array  # [R]
    env_params: EnvParams = None
    rows: Sequence[Setting] = ()  # the setting of each row; by default what differs between them

    @property
    def setting(self) -> Setting:
        """What tells the run apart in files, in trackers and on the console."""
        values = {NAME: self.label} if isinstance(self.label, str) else self.label
        return Setting(values, self.config.env.name)

    @property
    def settings(self) -> Settings:
        """Which rows have the same settings."""
        if self.rows:
            return grouped(self.rows)
        columns = setting_columns(self.hyperparams, self.env_params, self.config.env.params)
        return settings_of(columns, len(self.keys))


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that a result depends on."""

    def version(name: str) -> str:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}


def hardware() -> str:
    """The devices, and the CPU of the host."""
    devices = jax.devices()
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    return f"{len(devices)} × {devices[0].device_kind}; host {cpu}, {os.cpu_count()} cores"

"""The specification of a run, and the versions and the hardware that its numbers depend on."""

import importlib.metadata
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from grpo_jax.config import Config
from grpo_jax.environments import EnvParams
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.runs.settings import Settings, setting_columns, settings_of

PACKAGES = ("grpo-jax", "jax", "jaxlib", "flax", "optax", "gymnax", "numpy")  # on which a result depends


class RunSpec(NamedTuple):
    """A run of `R` rows (seeds × hyperparameters) before it is made; after the label come arguments of `run`."""

    label: str
    config: Config
    hyperparams: Hyperparams  # each leaf scalar or [R]
    keys: jax.Array  # [R]
    env_params: EnvParams = None
    labels: Sequence[str] = ()  # of the settings of the rows; by default what differs between them

    @property
    def name(self) -> str:
        """The run's name in `metrics.jsonl`, in trackers and on the console."""
        return f"{self.label} on {self.config.env.name}"

    @property
    def folder(self) -> str:
        """The name, in characters that a folder may have."""
        return folder_name(self.name)

    @property
    def settings(self) -> Settings:
        """Which rows have the same hyperparameters and env_params."""
        columns = setting_columns(self.hyperparams, self.env_params, self.config.env.params)
        settings = settings_of(columns, len(self.keys))
        if not self.labels:
            return settings
        return settings._replace(rows=dict(zip(self.labels, settings.rows.values(), strict=True)))


def folder_name(name: str) -> str:
    """The name with `_` for characters that a folder's name may not have."""
    return re.sub(r"[^\w.()-]+", "_", name)


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

"""The specification of a run: what tells it and its rows apart, and the versions and hardware its numbers depend on.

Rows that differ only in their key are seeds of one setting.
"""

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike

from grpo_jax.config import Config
from grpo_jax.environments import EnvParams
from grpo_jax.hyperparams import Hyperparams

PACKAGES = ("grpo-jax", "jax", "jaxlib", "flax", "optax", "gymnax", "numpy")  # on which a result depends
Value = int | float | str
NAME, CONFIG = "name", "config"
"""The fields whose values are names: of a run, and of one of several configs of a sweep."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """The values of the fields by which a run, or a row of one, differs from others; its text is only for printing."""

    values: Mapping[str, Value] = dataclasses.field(default_factory=dict)
    environment: str = ""  # of a row, that of its run

    def __hash__(self) -> int:
        return hash((self.environment, frozenset(self.values.items())))

    def __str__(self) -> str:
        """Such as "ppo", or "learning_rate=0.001, clip_high=0.3"."""
        shown = ((name, format_value(value)) for name, value in self.values.items())
        return ", ".join(text if name in (NAME, CONFIG) else f"{name}={text}" for name, text in shown)

    @property
    def title(self) -> str:
        """Such as "ppo on CartPole-v1"."""
        return f"{self} on {self.environment}" if self.environment else str(self)

    @property
    def folder(self) -> str:
        """The title, in characters that a folder may have."""
        return folder_name(self.title)


class Settings(NamedTuple):
    """The settings of the rows of a run, in the order in which they come."""

    rows: dict[Setting, np.ndarray]  # of each setting, a row a seed

    def ranked(self, scores: np.ndarray) -> list[Setting]:
        """The settings by the mean of the scores `[R]` over their seeds, the best first; those with NaN come last."""
        means = [np.mean(scores[rows]) for rows in self.rows.values()]
        order = np.argsort(-np.nan_to_num(means, nan=-np.inf), kind="stable")
        return [[*self.rows][i] for i in order]

    def best_row(self, scores: np.ndarray) -> int:
        """The best seed of the best setting, by the scores `[R]`."""
        rows = self.rows[self.ranked(scores)[0]]
        return int(rows[np.argmax(np.nan_to_num(scores[rows], nan=-np.inf))])

    @property
    def word(self) -> str:
        """What rows are called."""
        return "seeds" if len(self.rows) == 1 else "rows"


def settings_of(columns: Mapping[str, ArrayLike | None], num_rows: int) -> Settings:
    """Which rows of a run have the same settings.

    ```python
    settings = settings_of({"learning_rate": jnp.repeat(jnp.array([1e-3, 1e-2]), 8)}, 16)
    settings.rows[Setting({"learning_rate": 0.01})]  # 8 to 15
    ```

    Args:
      columns: hyperparameters and parameters of the environment by name. A column that is not `[num_rows]` does not
        tell rows apart: a number for all, or an array for the groups of each row.
      num_rows: `R`.

    Returns:
      The settings; of rows that are all alike one, without values.
    """
    values = {name: np.asarray(value) for name, value in columns.items() if np.shape(value) == (num_rows,)}
    values = {name: value.astype(np.float32) if value.dtype.kind == "f" else value for name, value in values.items()}
    values = {name: [*map(as_value, value)] for name, value in values.items() if (value != value[0]).any()}
    return grouped(Setting({name: value[row] for name, value in values.items()}) for row in range(num_rows))


def grouped(settings: Iterable[Setting]) -> Settings:
    """The rows of each setting, from the setting of each row."""
    rows: dict[Setting, list[int]] = {}
    for row, setting in enumerate(settings):
        rows.setdefault(setting, []).append(row)
    return Settings({setting: np.array(those) for setting, those in rows.items()})


def setting_columns(
    hyperparams: Hyperparams, env_params: EnvParams, defaults: Mapping[str, ArrayLike]
) -> dict[str, Any]:
    """The arguments of a run for `settings_of`.

    Args:
      hyperparams, env_params: as in `run`. A parameter that is an array, `[R, ...]`, gives a column for each entry,
        such as "goal[0]"; values for the groups of each row give none.
      defaults: the parameters of the environment.
    """
    columns = dict(vars(hyperparams))
    for name, value in (env_params or {}).items():
        shape = np.shape(defaults.get(name, 0.0))
        if np.ndim(value) == 1 + len(shape):
            for index in np.ndindex(shape):
                field = f"{name}{list(index) if shape else ''}"
                columns[f"env_params/{field}" if field in columns else field] = np.asarray(value)[:, *index]
    return columns


def as_value(number: Any) -> Value:
    """A number of NumPy as one of Python: a float32 as it is written, 0.001 and not 0.0010000000475."""
    return float(str(number)) if isinstance(number, np.floating) else number.item()


def format_value(value: Value) -> str:
    """A value, exactly, in few characters."""
    if isinstance(value, str | bool):
        return str(value)
    short = f"{value:g}"
    return short if float(short) == value else str(value)


def list_first(values: Sequence[Any]) -> str:
    """The first ten values in brackets, and how many more there are."""
    shown = ", ".join(map(str, values[:10]))
    return f"[{shown}, and {len(values) - 10} more]" if len(values) > 10 else f"[{shown}]"


def folder_name(name: str) -> str:
    """The name with `_` for characters that a folder's name may not have; of a long one the beginning and a digest."""
    name = re.sub(r"[^\w.()-]+", "_", name)
    return name if len(name) <= 120 else f"{name[:110]}_{zlib.crc32(name.encode()):08x}"


class RunSpec(NamedTuple):
    """A run of `R` rows (seeds × hyperparameters) before it is made; config to env_params are arguments of `run`."""

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
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def hardware() -> str:
    """The devices, and the CPU of the host."""
    devices = jax.devices()
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    return f"{len(devices)} × {devices[0].device_kind}; host {cpu}, {os.cpu_count()} cores"

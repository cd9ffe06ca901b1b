"""The settings of a run's rows. Rows that differ only in their key are seeds of one setting."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from grpo_jax.environments import EnvParams
from grpo_jax.hyperparams import Hyperparams

PREFIXES = "hyperparams/", "env_params/"
"""The prefixes of settings in `metrics.jsonl`."""


class Settings(NamedTuple):
    """The settings of the `R` rows of a run, in the order in which they come."""

    values: dict[str, np.ndarray]  # each [R]: the hyperparameters and env_params in which rows differ
    rows: dict[str, np.ndarray]  # by the label of a setting, such as "learning_rate=0.001": its rows, a row a seed

    def ranked(self, scores: np.ndarray) -> list[str]:
        """The labels by the mean of the scores `[R]` over their seeds, the best first; those with NaN come last."""
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
    settings.rows["learning_rate=0.01"]  # 8 to 15
    ```

    Args:
      columns: hyperparameters and parameters of the environment by name, perhaps with one of the `PREFIXES`. A column
        that is not `[num_rows]` does not tell rows apart: a number for all, or an array for the groups of each row.
      num_rows: `R`.

    Returns:
      The settings; of rows that are all alike one, with the label "".
    """
    values = {name: np.asarray(value) for name, value in columns.items() if np.shape(value) == (num_rows,)}
    values = {name: value.astype(np.float32) if value.dtype.kind == "f" else value for name, value in values.items()}
    values = {name: value for name, value in values.items() if (value != value[0]).any()}
    rows: dict[str, list[int]] = {}
    for row in range(num_rows):
        setting = [f"{name.rpartition('/')[2]}={format_value(value[row])}" for name, value in values.items()]
        rows.setdefault(", ".join(setting), []).append(row)
    return Settings(values, {label: np.array(those) for label, those in rows.items()})


def setting_columns(
    hyperparams: Hyperparams, env_params: EnvParams, defaults: Mapping[str, ArrayLike]
) -> dict[str, Any]:
    """The arguments of a run for `settings_of`, with the `PREFIXES`.

    Args:
      hyperparams, env_params: as in `run`. A parameter that is an array, `[R, ...]`, gives a column for each entry,
        such as "env_params/goal[0]"; values for the groups of each row give none.
      defaults: the parameters of the environment.
    """
    of_hyperparams, of_env_params = PREFIXES
    columns = {of_hyperparams + name: value for name, value in vars(hyperparams).items()}
    for name, value in (env_params or {}).items():
        shape = np.shape(defaults.get(name, 0.0))
        if np.ndim(value) == 1 + len(shape):
            for index in np.ndindex(shape):
                entry = list(index) if shape else ""
                columns[f"{of_env_params}{name}{entry}"] = np.asarray(value)[:, *index]
    return columns


def format_value(value: Any) -> str:
    """A setting, exactly, in few characters."""
    if isinstance(value, str | bool | np.bool_):
        return str(value)
    short = f"{value:g}"
    return short if float(short) == value else str(value)

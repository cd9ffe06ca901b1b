"""Host: `metrics.jsonl`, a JSON object an iteration, and the settings of a run's rows, which stand in it.

Rows that differ only in their key are seeds of one setting; others are different settings.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from grpo_jax.environments import EnvParams
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.recording.files import as_numbers, plain, write_text
from grpo_jax.training.progress import Chunk

METRICS_FILE = "metrics.jsonl"

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


def read_metrics(directory: Path) -> dict[str, Chunk]:
    """The iterations of each run in `metrics.jsonl`, by the run's name, with `seconds` 0.

    Metrics are `[n, R]`, float32, with NaN for null; `environment/steps` are int32, with 0 for null.
    """
    runs: dict[str, list[dict[str, Any]]] = {}
    for line in read_lines(directory):
        lines = runs.setdefault(line["run"], [])
        if line["iteration"] == len(lines):
            lines.append(line)
    return {run: _as_chunk(lines) for run, lines in runs.items() if lines}


def read_settings(directory: Path) -> dict[str, Settings]:
    """The settings of the rows of each run in `metrics.jsonl`, by the run's name."""
    found = {}
    for run, line in {line["run"]: line for line in read_lines(directory)}.items():
        columns = {name: as_numbers(values) for name, values in line.items() if name.startswith(PREFIXES)}
        found[run] = settings_of(columns, len(line["environment_steps"]))
    return found


def _as_chunk(lines: list[dict[str, Any]]) -> Chunk:
    last = {name: value for line in lines for name, value in line.items()}
    others = "run", "iteration", "environment_steps"
    names = [name for name in last if name not in others and not name.startswith(PREFIXES)]
    empty = [None] * len(lines[0]["environment_steps"])  # a resumed run may have evaluations that it had not before
    metrics = {name: np.array([line.get(name, empty) for line in lines], np.float32) for name in names}
    if "environment/steps" in metrics:
        made = np.array([line["environment/steps"] for line in lines], np.float64)  # exact beyond float32's 2^24
        metrics["environment/steps"] = np.nan_to_num(made).astype(np.int32)
    return Chunk(metrics, np.array([line["environment_steps"] for line in lines], np.int64), iteration=0, seconds=0.0)


def read_lines(directory: Path) -> Iterator[dict[str, Any]]:
    """The lines of `metrics.jsonl`, of all runs; one that was not written to its end is left out."""
    path = Path(directory) / METRICS_FILE
    if path.exists():
        with path.open(encoding="utf-8") as file:
            for line in file:
                with contextlib.suppress(json.JSONDecodeError):  # its writer was killed
                    yield json.loads(line)


def as_lines(run: str, chunk: Chunk, active: np.ndarray, settings: Settings) -> Iterator[str]:
    """A line for each iteration of a chunk: null for NaN, infinity, and rows that are not active, `[n, R]`."""
    columns = {"environment_steps": chunk.steps.tolist()}
    for name, values in chunk.metrics.items():
        columns[name] = np.where(active & np.isfinite(values), values.astype(object), None).tolist()
    # No more digits than float32 has.
    rows = {
        name: [plain(float(str(value)) if value.dtype.kind == "f" else value.item()) for value in values]
        for name, values in settings.values.items()
    }
    for i in range(len(chunk.steps)):
        line = {"run": run, "iteration": chunk.iteration + i} | {name: column[i] for name, column in columns.items()}
        yield json.dumps(line | rows, allow_nan=False) + "\n"


def truncate_metrics(directory: Path, run: str, num_iterations: int) -> None:
    """Removes the lines of a run in `metrics.jsonl` beyond its first `num_iterations` iterations."""
    kept = [line for line in read_lines(directory) if line["run"] != run or line["iteration"] < num_iterations]
    write_text(directory / METRICS_FILE, "".join(json.dumps(line) + "\n" for line in kept))

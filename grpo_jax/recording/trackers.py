"""Host: the metrics of a run in TensorBoard or Weights & Biases, of many seeds as quantiles."""

import hashlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from grpo_jax.errors import ConfigError

QUARTILES = {"": 0.5, "_q25": 0.25, "_q75": 0.75}
"""The quantile of each suffix of a metric's name."""


class Tracker(Protocol):
    """Receives the metrics of a run beside `metrics.jsonl`."""

    def record(self, iteration: int, steps: np.ndarray, metrics: Mapping[str, np.ndarray]) -> None:
        """Takes a chunk, iterations from that index on; arrays are `[n, num_seeds]`, NaN where there is no value."""

    def close(self) -> None:
        """Writes what is not written yet."""


class TensorBoard:
    """TensorBoard's event files; their steps are the median over seeds of the environment steps.

    Args:
      directory: for the event files of this run alone.
      first_step: events of an earlier process from this step on are hidden.
    """

    def __init__(self, directory: Path, *, first_step: int = 0):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=first_step)

    def record(self, iteration: int, steps: np.ndarray, metrics: Mapping[str, np.ndarray]) -> None:
        """One event an iteration, with all scalars: writing each by itself takes longer than small iterations do."""
        from tensorboardX.proto.summary_pb2 import Summary

        for step, scalars in zip(np.median(steps, axis=1), over_seeds(metrics), strict=True):
            values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
            self._writer.file_writer.add_summary(Summary(value=values), int(step))
        self._writer.flush()

    def close(self) -> None:
        """Flushes and closes the file."""
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, which a resumed run continues.

    Args:
      directory: of the results; in offline mode, the data is kept there.
      run: the run's name.
      mode: "online" or "offline".
      config: the settings of the run.
    """

    def __init__(self, directory: Path, *, run: str, mode: str, config: Mapping[str, Any]):
        check_installed("wandb")
        import wandb

        directory = Path(directory).resolve()
        identity = hashlib.sha1(f"{directory}\n{run}".encode()).hexdigest()[:16]
        self._run = wandb.init(
            project="grpo_jax", name=run, id=identity, resume="allow", dir=directory, mode=mode, config=dict(config)
        )

    def record(self, iteration: int, steps: np.ndarray, metrics: Mapping[str, np.ndarray]) -> None:
        """One call an iteration."""
        for row, (step, scalars) in enumerate(zip(np.median(steps, axis=1), over_seeds(metrics), strict=True)):
            self._run.log(scalars | {"environment_steps": int(step)}, step=iteration + row)

    def close(self) -> None:
        """Sends what is not sent yet, in online mode."""
        self._run.finish()


def log_table(name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, iteration: int) -> None:
    """Adds a table to the active run of Weights & Biases.

    Args:
      name: of the table.
      columns, rows: the names of the columns, and a value for each in every row.
      iteration: number of iterations so far; the table is logged beside the metrics of the last of them.
    """
    import wandb

    table = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
    wandb.run.log({name: table}, step=max(iteration - 1, 0))


def check_installed(package: str) -> None:
    """Raises ConfigError if a package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{package} is not installed: pip install {package}, or do without it")


def over_seeds(metrics: Mapping[str, np.ndarray]) -> list[dict[str, float]]:
    """The scalars of each iteration: a metric itself with one seed, else its median and quartiles; never NaN.

    Args:
      metrics: each `[n, num_seeds]`; seeds without a finite value do not count.
    """
    columns = {}
    for name, values in metrics.items():
        values = np.sort(np.where(np.isfinite(values), values, np.nan), axis=1)  # NaN comes last
        last = np.sum(~np.isnan(values), axis=1) - 1
        for suffix, quantile in QUARTILES.items() if values.shape[1] > 1 else [("", 0.5)]:
            place = quantile * np.maximum(last, 0)
            low, high = (
                np.take_along_axis(values, index.astype(int)[:, None], axis=1)[:, 0]
                for index in (np.floor(place), np.ceil(place))
            )
            columns[name + suffix] = low + (place - np.floor(place)) * (high - low)
    num_iterations = len(next(iter(columns.values()), ()))
    return [
        {name: float(column[i]) for name, column in columns.items() if not np.isnan(column[i])}
        for i in range(num_iterations)
    ]

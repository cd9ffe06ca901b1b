"""The result of a sweep: settings ranked by their mean over seeds, their curves, their policies."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from grpo_jax.errors import ConfigError, nearest
from grpo_jax.recording import TrainedPolicy, bootstrap_interval, iqm, load
from grpo_jax.recording.statistics import describe_seeds
from grpo_jax.sweeps.grid import Value
from grpo_jax.sweeps.runs import Run
from grpo_jax.training.curves import Block, as_dataframe, stacked

if TYPE_CHECKING:
    import pandas


class RankedSetting(NamedTuple):
    """A setting of a sweep, and how well it did over its seeds."""

    label: str  # such as "learning_rate=0.001, gae_lambda=0.95"
    values: dict[str, Value]  # on each axis of the sweep
    mean: float  # interquartile mean over seeds of the final return
    low: float  # its 95% interval: bootstrap over seeds
    high: float
    final_returns: np.ndarray  # [num_seeds]


@dataclasses.dataclass(frozen=True, repr=False)
class SweepResult:
    """What `sweep` returns; `print` shows the ranking.

    Attributes:
      out: the folder.
      axes: names of the fields that vary.
      runs: a finished run for each setting, in the order of the grid: `run.result.metrics` are `[n, num_seeds]`.
      points: the value of each setting on each axis.
    """

    out: Path
    axes: tuple[str, ...]
    runs: list[Run]
    points: list[tuple[Value, ...]]

    @property
    def ranking(self) -> list[RankedSetting]:
        """The settings by their interquartile mean of the final return, the best first; NaN comes last."""
        settings = [
            RankedSetting(
                run.label,
                dict(zip(self.axes, point, strict=True)),
                float(iqm(run.final_returns)),
                *bootstrap_interval(run.final_returns),
                run.final_returns,
            )
            for run, point in zip(self.runs, self.points, strict=True)
        ]
        return sorted(settings, key=lambda setting: -np.nan_to_num(setting.mean, nan=-np.inf))

    @property
    def ranked_runs(self) -> list[Run]:
        """The runs in the order of the ranking."""
        runs = {run.label: run for run in self.runs}
        return [runs[setting.label] for setting in self.ranking]

    @property
    def by_setting(self) -> dict[str, Block]:
        """The values, steps and metrics of each setting, whose columns are its seeds, by its label."""
        points = [dict(zip(self.axes, point, strict=True)) for point in self.points]
        runs = zip(self.runs, points, strict=True)
        return {run.label: Block(point, run.result.steps, run.result.metrics) for run, point in runs}

    def curves(self) -> dict[str, np.ndarray]:
        """Each metric, and the `environment_steps` made so far, as `[settings, seeds, iterations]`, NaN-padded.

        Settings are in the order of `runs`.
        """
        return stacked([*self.by_setting.values()])

    def to_dataframe(self) -> "pandas.DataFrame":
        """A table of pandas, with a line for each iteration of each seed of each setting.

        Its columns are the axes, `seed`, `iteration`, `environment_steps` and the metrics.
        Raises ConfigError if pandas is not installed.
        """
        return as_dataframe([*self.by_setting.values()])

    def load(
        self,
        setting: str | None = None,
        *,
        seed: int | Literal["all", "best"] = "all",
        which: Literal["final", "best"] = "final",
    ) -> TrainedPolicy:
        """The trained policies of the best setting by its mean, a row for each seed; or of one seed.

        Args:
          setting: its label, of another one.
          seed: the number of a seed; "best" is the one with the highest score, a lucky one.
          which: see `grpo_jax.load`.

        Raises:
          ConfigError: there is no such setting or seed, or the setting's policies were not kept: those of the best ten
            are.
        """
        ranked = [each.label for each in self.ranking]
        label = ranked[0] if setting is None else setting
        if label not in ranked:
            raise ConfigError(f"the sweep has no setting {label!r}: {nearest(label, ranked)}")
        config = self.ranked_runs[ranked.index(label)].config
        return load(self.out, label, row=seed, which=which, config=config)

    def __repr__(self) -> str:
        num_seeds = len(self.runs[0].final_returns)
        lines = [f"{self.runs[0].environment}, final return: {describe_seeds(num_seeds)}"]
        width = max(len(run.label) for run in self.runs)
        for rank, (label, _, mean, low, high, _) in enumerate(self.ranking, start=1):
            lines.append(f"{rank:>3}  {label:<{width}}  {mean:.4g} [{low:.4g}, {high:.4g}]")
        return "\n".join([*lines, f"in {self.out}"])

"""The result of a sweep: settings ranked by their mean over seeds, their curves, their policies."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from grpo_jax.errors import ConfigError, nearest
from grpo_jax.recording import TrainedPolicy, load
from grpo_jax.recording.statistics import describe_seeds
from grpo_jax.runs.result import RunResult, as_dataframe, stacked
from grpo_jax.runs.run_spec import Setting, Value
from grpo_jax.sweeps.runs import Run

if TYPE_CHECKING:
    import pandas


@dataclasses.dataclass(frozen=True, repr=False)
class SweepResult:
    """What `sweep` returns; `print` shows the ranking.

    Attributes:
      out: the folder.
      settings: a `Run` of each, in the order of the grid.
    """

    out: Path
    settings: list[Run]

    @property
    def ranking(self) -> list[Run]:
        """The settings by their interquartile mean of the final return, the best first; NaN comes last."""
        return sorted(self.settings, key=lambda setting: -np.nan_to_num(setting.mean, nan=-np.inf))

    @property
    def environment(self) -> str:
        """The environment's name."""
        return self.settings[0].environment

    @property
    def num_seeds(self) -> int:
        """Of each setting."""
        return len(self.settings[0].final_returns)

    @property
    def by_setting(self) -> dict[Setting, RunResult]:
        """The result of each setting, whose columns are its seeds."""
        return {run.setting: run.result for run in self.settings}

    def curves(self) -> dict[str, np.ndarray]:
        """Each metric, and the `environment_steps` made so far, as `[settings, seeds, iterations]`, NaN-padded."""
        return stacked(self.by_setting.values())

    def to_dataframe(self) -> "pandas.DataFrame":
        """A table of pandas, with a line for each iteration of each seed of each setting.

        Its columns are the axes, `seed`, `iteration`, `environment_steps` and the metrics.
        Raises ConfigError if pandas is not installed.
        """
        return as_dataframe(self.by_setting)

    def load(
        self,
        setting: Mapping[str, Value] | str | None = None,
        *,
        seed: int | Literal["all", "best"] = "all",
        which: Literal["final", "best"] = "final",
    ) -> TrainedPolicy:
        """The trained policies of the best setting by its mean, a row for each seed; or of one seed.

        Args:
          setting: the values of another one, or its label.
          seed: the number of a seed; "best" is the one with the highest score, a lucky one.
          which: see `grpo_jax.load`.

        Raises:
          ConfigError: there is no such setting or seed, or the setting's policies were not kept: those of the best ten
            are.
        """
        ranking = self.ranking
        found = next((each for each in ranking if setting in (None, each.label, each.values)), None)
        if found is None:
            labels = [each.label for each in ranking]
            raise ConfigError(f"the sweep has no setting {setting!r}: {nearest(str(setting), labels)}")
        return load(self.out, found.label, row=seed, which=which, config=found.config)

    def __repr__(self) -> str:
        lines = [f"{self.environment}, final return: {describe_seeds(self.num_seeds)}"]
        width = max(len(setting.label) for setting in self.settings)
        for rank, setting in enumerate(self.ranking, start=1):
            low, high = setting.interval
            lines.append(f"{rank:>3}  {setting.label:<{width}}  {setting.mean:.4g} [{low:.4g}, {high:.4g}]")
        return "\n".join([*lines, f"in {self.out}"])

"""Finished runs, with their final returns; a sweep of them, ranked by their means over seeds."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import jax
import numpy as np

from grpo_jax.algorithms import name_of
from grpo_jax.config import Config
from grpo_jax.errors import ConfigError, function_name, nearest
from grpo_jax.evaluation.episodes import evaluate
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.recording.config_file import config_fields
from grpo_jax.recording.statistics import bootstrap_interval, describe_estimate, describe_seeds, estimate, iqm
from grpo_jax.recording.trained_policy import TrainedPolicy, load
from grpo_jax.runs.result import RunResult, as_dataframe, columns_of
from grpo_jax.runs.run_spec import Setting, Value, grouped
from grpo_jax.types import TrainState

if TYPE_CHECKING:
    import pandas


def run_keys(seed: int, num_seeds: int) -> tuple[jax.Array, jax.Array]:
    """The keys of the seeds of a run, `[num_seeds]`, and those of their final evaluations."""
    training, evaluation = jax.random.split(jax.random.key(seed))
    return jax.random.split(training, num_seeds), jax.random.split(evaluation, num_seeds)


class Run(NamedTuple):
    """A finished run: one algorithm on one environment, all seeds."""

    setting: Setting
    config: Config
    hyperparams: Hyperparams
    result: RunResult
    final_returns: np.ndarray  # [num_seeds]
    wall_seconds: float  # of this process; `train_seconds` of the result also has those before a run was resumed
    core_seconds: float  # likewise, summed over cores: not affected by other processes that slow this one down
    warnings: Sequence[str] = ()

    def __repr__(self) -> str:
        """What it is, and its final return."""
        score = describe_estimate(estimate(self.final_returns))
        return f"{self.setting.title}: final return {score}, {describe_seeds(len(self.final_returns))}"

    def of_rows(self, rows: np.ndarray, setting: Setting, hyperparams: Hyperparams) -> "Run":
        """The run of some of the rows; it keeps the time of all of them together, and no states."""
        part = columns_of(self.result, rows)
        result = self.result._replace(
            states=None,
            metrics=part.metrics,
            steps=part.steps,
            evaluations=jax.tree.map(lambda each: each if each.ndim == 1 else each[:, rows], self.result.evaluations),
            ended_by=self.result.ended_by[rows],
            used=self.result.used[rows],
            settings=grouped([Setting()] * len(rows)),
        )
        final_returns = self.final_returns[rows]
        return self._replace(setting=setting, hyperparams=hyperparams, result=result, final_returns=final_returns)

    @property
    def values(self) -> Mapping[str, Value]:
        """Those of the setting: of a sweep, one on each axis."""
        return self.setting.values

    @property
    def label(self) -> str:
        """The values as a text, such as "learning_rate=0.001, gae_lambda=0.95"."""
        return str(self.setting)

    @property
    def mean(self) -> float:
        """The interquartile mean over seeds of the final return."""
        return float(iqm(self.final_returns))

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of the mean: a bootstrap over seeds."""
        return bootstrap_interval(self.final_returns)

    @property
    def environment(self) -> str:
        """The environment's name."""
        return self.config.env.name

    @property
    def returns(self) -> np.ndarray:
        """`[num_iterations, num_seeds]` mean return of the training episodes that ended."""
        return self.result.metrics["episode/return_mean"]

    @property
    def steps_per_second(self) -> float:
        """Environment steps of all seeds per second of training, without compilation."""
        return float(self.result.steps[-1].sum()) / self.result.train_seconds


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

    def to_dataframe(self) -> "pandas.DataFrame":
        """A table of pandas, with a line for each iteration of each seed of each setting.

        Its columns are the axes, `seed`, `iteration`, `environment_steps` and the metrics.
        """
        return as_dataframe(self.by_setting)

    def ranking_dataframe(self) -> "pandas.DataFrame":
        """A table of pandas, with a line for each setting, the best first: for `to_latex`, `to_markdown`, `to_csv`.

        Its columns are the axes, `final_return`, and `low` and `high`, the ends of its 95% interval over seeds.
        """
        import pandas

        names = "final_return", "low", "high"  # of one seed, the first alone
        numbers = (dict(zip(names, estimate(run.final_returns), strict=False)) for run in self.ranking)
        return pandas.DataFrame([{**run.values, **each} for run, each in zip(self.ranking, numbers, strict=True)])

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
            lines.append(f"{rank:>3}  {setting.label:<{width}}  {describe_estimate(estimate(setting.final_returns))}")
        return "\n".join([*lines, f"in {self.out}"])


class Score(NamedTuple):
    """The score of a trained policy, which is a run's final return."""

    # (config, state, key) -> scalar; None: whoever trains adds the score
    function: Callable[[Config, TrainState, jax.Array], jax.Array] | None
    caption: str


@functools.cache
def sampled_return(num_episodes: int) -> Score:
    """The mean return of that many sampled episodes."""

    def score(config: Config, state: TrainState, key: jax.Array) -> jax.Array:
        return evaluate(config, state, key, num_episodes=num_episodes).returns.mean()

    return Score(score, f"{num_episodes} sampled episodes each")


NUM_FINAL = 128
SAMPLED_RETURN = sampled_return(NUM_FINAL)


def summarise(run: Run) -> dict:
    """What summary.json says of a run."""
    fields, missing = config_fields(run.config)
    fields |= {field: function_name(getattr(run.config, field))[:200] for field in missing}
    fields |= {"environment": run.environment, "algorithm": name_of(run.config.algorithm)}
    return {
        **vars(run.setting),
        "num_seeds": len(run.final_returns),
        "environment_steps": run.result.steps[-1].tolist(),
        "ended_by": run.result.ended_by.tolist(),
        "budget_used": run.result.used.tolist(),
        "final_return": score_summary(run.final_returns),
        "steps_per_second": run.steps_per_second,
        "compile_seconds": run.result.compile_seconds,
        "train_seconds": run.result.train_seconds,
        "wall_seconds": run.wall_seconds,
        "core_seconds": run.core_seconds,
        "warnings": run.warnings,
        "skipped_updates": int(np.nansum(run.result.metrics["optim/skipped_updates"])),
        "config": fields,
        "hyperparams": {name: getattr(run.hyperparams, name) for name in run.hyperparams.__dataclass_fields__},
    }


def score_summary(scores: np.ndarray) -> dict:
    """The interquartile mean of `[num_seeds]` scores, its 95% interval, and the scores."""
    return {"iqm": iqm(scores), "ci95": bootstrap_interval(scores), "per_seed": scores}

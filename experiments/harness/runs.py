"""A run that is planned, how it is scored, and what is told of it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from experiments.harness.settings import settings
from grpo_jax import Config, Hyperparams, TrainState, evaluate
from grpo_jax.algorithms import name_of
from grpo_jax.recording.statistics import bootstrap_interval, iqm
from grpo_jax.training.run import RunResult

PROGRAMS = "programs"


class Run(NamedTuple):
    """One algorithm on one environment, all seeds."""

    label: str
    config: Config
    hyperparams: Hyperparams
    result: RunResult
    final_returns: np.ndarray  # [num_seeds]
    wall_seconds: float  # of this process; what a resumed run took before is in the result's `train_seconds` alone
    core_seconds: float  # likewise, of all cores together, also where other processes slow this one down
    warnings: Sequence[str] = ()

    @property
    def environment(self) -> str:
        """Name of the environment."""
        return self.config.env.name

    @property
    def returns(self) -> np.ndarray:
        """`[num_iterations, num_seeds]` mean return of the training episodes that ended."""
        return self.result.metrics["episode/return_mean"]

    @property
    def counts(self) -> np.ndarray:
        """`[num_iterations, num_seeds]` how many training episodes ended."""
        return np.nan_to_num(self.result.metrics["episode/count"])

    @property
    def episodes(self) -> np.ndarray:
        """`[num_iterations, num_seeds]` training episodes that ended so far."""
        return np.cumsum(self.counts, axis=0)

    @property
    def steps_per_second(self) -> float:
        """Environment steps of all seeds in a second of training, compile apart."""
        return float(self.result.steps[-1].sum()) / self.result.train_seconds


class Plan(NamedTuple):
    """A run to be made."""

    label: str
    config: Config
    hyperparams: Hyperparams


def make_plan(environment: str, algorithm: str, *, total_steps: int, **fields) -> Plan:
    """A run with the settings that are known to work for this environment and this algorithm, or with other fields."""
    fields = settings(environment, algorithm) | fields
    of_config = {name: value for name, value in fields.items() if name in Config.__dataclass_fields__}
    of_hyperparams = {name: value for name, value in fields.items() if name not in of_config}
    config = Config(environment=environment, algorithm=algorithm, **of_config)
    return Plan(algorithm, config, Hyperparams(total_steps=total_steps, **of_hyperparams))


class Score(NamedTuple):
    """What a trained policy is worth: a run's final return."""

    of: Callable[[Config, TrainState, jax.Array], jax.Array]  # (config, state, key) -> scalar
    caption: str


def sampled_return(num_episodes: int) -> Score:
    """The mean return of that many sampled episodes."""
    return Score(
        lambda config, state, key: evaluate(config, state, key, num_episodes=num_episodes).returns.mean(),
        f"{num_episodes} sampled episodes each",
    )


SAMPLED_RETURN = sampled_return(128)


def summarise(run: Run) -> dict:
    """What summary.json says of a run."""
    config = {name: getattr(run.config, name) for name in run.config.__dataclass_fields__}
    return {
        "algorithm": run.label,
        "environment": run.environment,
        "num_seeds": len(run.final_returns),
        "environment_steps": run.result.steps[-1].tolist(),
        "final_return": {
            "iqm": iqm(run.final_returns),
            "ci95": bootstrap_interval(run.final_returns),
            "per_seed": run.final_returns,
        },
        "steps_per_second": run.steps_per_second,
        "compile_seconds": run.result.compile_seconds,
        "wall_seconds": run.wall_seconds,
        "core_seconds": run.core_seconds,
        "warnings": run.warnings,
        "skipped_updates": int(np.nansum(run.result.metrics["optim/skipped_updates"])),
        "config": config | {"environment": run.environment, "algorithm": name_of(run.config.algorithm)},
        "hyperparams": {name: getattr(run.hyperparams, name) for name in run.hyperparams.__dataclass_fields__},
    }

"""Evaluations while training, and criteria that stop a run because of them."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from grpo_jax.config import Config, kept_with
from grpo_jax.devices.mesh import make_rows_function
from grpo_jax.errors import ConfigError, as_count
from grpo_jax.evaluation.episodes import evaluate
from grpo_jax.types import TrainState

SAMPLED, GREEDY = "evaluation/return_sampled", "evaluation/return_greedy"
"""The names of the returns among the metrics."""

_STREAM = 2**31  # of the random numbers of evaluations: training draws others from the same key


class Evaluations(NamedTuple):
    """The `K` evaluations of a run so far, on the host; `R` rows."""

    iterations: np.ndarray  # int64 [K] iterations made before each
    steps: np.ndarray  # int64 [K, R] environment steps made before each
    sampled: np.ndarray  # float64 [K, R] mean return with sampled actions
    greedy: np.ndarray  # float64 [K, R] mean return with the most probable actions

    def append(self, iteration: int, steps: np.ndarray, sampled: np.ndarray, greedy: np.ndarray) -> "Evaluations":
        """With one more evaluation, of `[R]` steps and returns."""
        new = Evaluations(iteration, steps, sampled, greedy)
        return jax.tree.map(lambda old, one: np.concatenate([old, np.array([one], old.dtype)]), self, new)


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """When `run` evaluates the policies, and which rows it stops because of it.

    Args:
      every: iterations between two evaluations, each at the end of a chunk and the last one at the end of the run, also
        if a callback ends it. The metrics get `evaluation/return_sampled` and `evaluation/return_greedy`, NaN between.
      episodes: of an evaluation, and again as many with greedy actions.
      stop_when: called after each evaluation with all of them so far; returns bool `[R]`, the rows to stop, as
        `reached_return` does, or one bool for all rows.

    Raises:
      ConfigError: a number is not a positive integer, or `stop_when` is not a function.
    """

    every: int
    episodes: int = 32
    stop_when: Callable[[Evaluations], np.ndarray] | None = None

    def __post_init__(self):
        as_count("every", self.every, "the iterations between two evaluations (--evaluate-every)")
        as_count("episodes", self.episodes, "of each evaluation (--evaluation-episodes)")
        if not (self.stop_when is None or callable(self.stop_when)):
            raise ConfigError(f"stop_when={self.stop_when!r} is not a function; use one, such as reached_return(475.0)")


def no_evaluations(num_rows: int) -> Evaluations:
    """The evaluations before the first: `K` is 0."""
    empty = np.zeros((0, num_rows))
    return Evaluations(np.zeros(0, np.int64), empty.astype(np.int64), empty, empty)


def make_evaluation(
    config: Config, keys: jax.Array, num_episodes: int, mesh: Mesh
) -> Callable[[TrainState, int], np.ndarray]:
    """`evaluation(states, iteration) -> [R, 2]`: mean returns with sampled and with greedy actions.

    The episodes depend only on the policies, the iteration and `keys`, those that the run began with. Training draws
    other random numbers, so it is the same with and without evaluations.
    """

    def mean_returns(state, key):
        returns = [evaluate(config, state, key, num_episodes=num_episodes, greedy=greedy) for greedy in (False, True)]
        return jnp.stack([episodes.returns.mean() for episodes in returns])

    key = "returns", num_episodes, mesh
    returns_of_rows = kept_with(config, key, lambda: make_rows_function(mean_returns, mesh))

    fold_in = jax.vmap(jax.random.fold_in, in_axes=(0, None))
    return lambda states, iteration: returns_of_rows(states, fold_in(fold_in(keys, _STREAM), iteration))


def reached_return(threshold: float) -> Callable[[Evaluations], np.ndarray]:
    """For `Evaluate(stop_when=...)`: a row stops once the mean return of sampled actions is at least `threshold`."""
    if (number := np.asarray(threshold)).dtype.kind not in "iuf" or not np.isfinite(number).all():
        raise ConfigError(f"threshold={threshold!r} (--stop-at-return) is not a return; use a number such as 475.0")
    return lambda evaluations: (evaluations.sampled >= threshold).any(axis=0)

"""A run's budget of environment steps, iterations and episodes, counted exactly however long the run."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config import Config
from grpo_jax.errors import ConfigError
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.types import StepCount, TrainState

_MOST_ITERATIONS = 2**31 - 2  # one more is still an int32


class Budget(NamedTuple):
    """A value for each reason to end a run, such as its limit; None where there is none. Scalars, or `[R]`."""

    stopped: jax.Array  # bool: by `stop_when` or a callback
    total_steps: StepCount | jax.Array | None
    num_iterations: jax.Array | None
    max_episodes: StepCount | jax.Array | None


def fractions_done(state: TrainState) -> dict[str, jax.Array]:
    """The fraction of each limit of the hyperparameters that is used, float32, by name."""
    hyperparams, used = state.hyperparams, {}
    if hyperparams.num_iterations is None:
        used["total_steps"] = state.steps.as_float() / hyperparams.total_steps
    else:
        used["num_iterations"] = state.iteration.astype(jnp.float32) / hyperparams.num_iterations
    if hyperparams.max_episodes is not None:
        used["max_episodes"] = state.episodes.as_float() / hyperparams.max_episodes
    return used


def fraction_done(state: TrainState) -> jax.Array:
    """The fraction of training that is done: of the limit that is used most."""
    return functools.reduce(jnp.maximum, fractions_done(state).values())


def make_budget(hyperparams: Hyperparams, stopped: np.ndarray) -> Budget:
    """The limits of each row, as NumPy arrays `[R]`. Infinity becomes more than any run makes.

    Args:
      hyperparams: leaves are scalars or `[R]`.
      stopped: bool `[R]`, the rows that make no more iterations.
    """

    def rows(numbers):
        return np.broadcast_to(np.asarray(numbers), stopped.shape).astype(np.int32)

    def count(numbers):
        return StepCount(*map(rows, np.divmod(np.minimum(numbers, 2.0**61).astype(np.int64), 2**31)))

    # Steps may not exceed their limit, so it is rounded down; episodes have to reach theirs, so it is rounded up.
    iterations, episodes = hyperparams.num_iterations, hyperparams.max_episodes
    return Budget(
        stopped=stopped,
        total_steps=count(np.floor(np.float64(hyperparams.total_steps))) if iterations is None else None,
        num_iterations=None if iterations is None else rows(iterations),
        max_episodes=None if episodes is None else count(np.ceil(np.float64(episodes))),
    )


def spent(budget: Budget, state: TrainState) -> Budget:
    """For each limit, bool: it allows no further iteration.

    Environment steps allow one if there are enough for another one like the last. It may take more, so a run exceeds
    its limit of steps by less than one iteration, and only where episodes are getting longer.
    """
    steps, iterations, episodes = budget.total_steps, budget.num_iterations, budget.max_episodes
    return Budget(
        stopped=budget.stopped,
        total_steps=None if steps is None else ~state.steps.plus(state.last_steps).at_most(steps),
        num_iterations=None if iterations is None else state.iteration >= iterations,
        max_episodes=None if episodes is None else episodes.at_most(state.episodes),
    )


def allows_another(budget: Budget, state: TrainState) -> jax.Array:
    """Whether no limit is spent."""
    return ~functools.reduce(jnp.logical_or, jax.tree.leaves(spent(budget, state)))


def check_budget(config: Config, hyperparams: Hyperparams) -> None:
    """Raises ConfigError if hyperparameters are invalid, or a budget is endless or too small for one iteration."""
    hyperparams.check()
    if np.min(hyperparams.temperature) == 0:
        raise ConfigError("temperature=0 is greedy, but training needs samples; use 1.0, and greedy evaluations")
    if hyperparams.num_iterations is None:
        _check_total_steps(config, hyperparams)
    else:
        _check_num_iterations(hyperparams)


def _check_num_iterations(hyperparams: Hyperparams) -> None:
    """Raises ConfigError unless they are counts, and total_steps is not a budget too."""
    for number in np.atleast_1d(np.float64(hyperparams.num_iterations)):
        if not (1 <= number <= _MOST_ITERATIONS and number == np.floor(number)):
            raise ConfigError(f"num_iterations={number:g} is not a positive integer below 2^31")
        for steps in np.atleast_1d(hyperparams.total_steps):
            if steps not in (Hyperparams.total_steps, math.inf):
                raise ConfigError(f"total_steps={steps:g} and num_iterations={number:g} are two budgets; leave out one")


def _check_total_steps(config: Config, hyperparams: Hyperparams) -> None:
    """Raises ConfigError unless they allow an iteration and end the run, or episodes do."""
    smallest = float(np.min(hyperparams.total_steps))
    if not smallest >= config.steps_per_iteration:
        advice, limit = "raise total_steps or lower num_envs or num_steps", config.env.max_steps
        if config.algorithm.start.from_reset and config.num_steps >= limit:
            fewer = int(max(smallest, 0)) // limit // config.group_size * config.group_size
            sizes = f"num_envs={fewer} or fewer" if fewer else "a lower max_steps_in_episode in env_params"
            advice = f"one-episode groups play to the limit of {config.env.name}, {limit} steps; raise total_steps, or "
            advice += f"use {sizes}, or an algorithm whose episodes continue, such as ppo"
        raise ConfigError(
            f"total_steps={smallest:.0f} does not allow one iteration of num_envs * num_steps = "
            f"{config.steps_per_iteration} environment steps; {advice}"
        )
    largest, max_episodes = float(np.max(hyperparams.total_steps)), _max_episodes(hyperparams)
    cut = not config.algorithm.start.auto_reset and config.num_steps < config.env.max_steps
    if largest == math.inf and (max_episodes == math.inf or cut):
        why = "episodes that are cut off need never end" if cut else "there is no max_episodes"
        raise ConfigError(f"total_steps=inf, and {why}, so nothing ends the run; use a number, or num_iterations")
    if most_steps(config, hyperparams) > _MOST_ITERATIONS * config.steps_per_iteration:
        number = f"max_episodes={max_episodes:g}" if largest == math.inf else f"total_steps={largest:g}"
        raise ConfigError(f"{number} may take more than 2^31 iterations; use fewer")


def most_steps(config: Config, hyperparams: Hyperparams) -> int:
    """The most environment steps that a row may make, if episodes do not get longer at the end.

    They follow from `num_iterations` or `total_steps`, or, without these, from `max_episodes` of the longest length.
    """
    if hyperparams.num_iterations is not None:
        return int(np.max(hyperparams.num_iterations)) * config.steps_per_iteration
    total_steps = float(np.max(hyperparams.total_steps))
    if total_steps < math.inf:
        return int(total_steps)
    rollouts_per_episode = max(1.0, config.env.max_steps / config.num_steps)
    num_iterations = math.ceil(math.ceil(_max_episodes(hyperparams) / config.num_envs) * rollouts_per_episode)
    return num_iterations * config.steps_per_iteration


def _max_episodes(hyperparams: Hyperparams) -> float:
    """The largest limit of a row; infinity if there is none."""
    return math.inf if hyperparams.max_episodes is None else float(np.max(hyperparams.max_episodes))

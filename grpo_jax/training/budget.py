"""A run's budget of environment steps and episodes, counted exactly however long the run."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.algorithms import ALGORITHMS
from grpo_jax.config import Config
from grpo_jax.errors import ConfigError
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.types import Count

_MOST_UNITS = 2**31 - 2  # one more is still an int32


class Budget(NamedTuple):
    """The most that a run may make; each count is a scalar, or `[R]`, one for each row."""

    steps: Count
    episodes: Count


def zero() -> Count:
    """The count 0."""
    return Count(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def add(count: Count, number: jax.Array, unit: int) -> Count:
    """The count plus `number`, which is at most `unit`."""
    rest = count.rest + number.astype(jnp.int32)
    return Count(count.units + rest // unit, rest % unit)


def share(count: Count, unit: int, total: jax.Array) -> jax.Array:
    """The count divided by `total`, float32; 0 if that is infinite."""
    return (count.units.astype(jnp.float32) + count.rest.astype(jnp.float32) / unit) * unit / total


def make_budget(total_steps: np.ndarray, max_episodes: float, num_rows: int, unit: int) -> Budget:
    """The budget of each row, `[num_rows]`, as NumPy arrays. Infinity becomes more than any run makes."""

    def count(whole):
        whole = np.minimum(whole, _MOST_UNITS * unit).astype(np.int64)
        return Count(*(np.broadcast_to(part, num_rows).astype(np.int32) for part in np.divmod(whole, unit)))

    # Steps may not exceed their limit, so it is rounded down; episodes have to reach theirs, so it is rounded up.
    total_steps, max_episodes = (np.asarray(number, np.float64) for number in (total_steps, max_episodes))
    return Budget(count(np.floor(total_steps)), count(np.ceil(max_episodes)))


def allows_another(budget: Budget, steps: Count, episodes: Count) -> jax.Array:
    """Whether steps are left for another whole iteration, and episodes for at least one more."""
    return _at_most(steps._replace(units=steps.units + 1), budget.steps) & ~_at_most(budget.episodes, episodes)


def _at_most(a: Count, b: Count) -> jax.Array:
    return (a.units < b.units) | ((a.units == b.units) & (a.rest <= b.rest))


def check_budget(config: Config, hyperparams: Hyperparams, max_episodes: float = math.inf) -> None:
    """Raises ConfigError if hyperparameters are invalid, or a budget is endless or too small for one iteration."""
    hyperparams.check()
    if not config.truncate_sampling and (np.min(hyperparams.top_k) < math.inf or np.min(hyperparams.top_p) < 1):
        raise ConfigError("top_k and top_p have no effect without truncate_sampling=True (--truncate-sampling)")
    if np.min(hyperparams.temperature) == 0:
        raise ConfigError(
            "temperature=0 takes the most probable token, but training needs samples; use 1.0, and greedy evaluations"
        )
    smallest = float(np.min(hyperparams.total_steps))
    if not smallest >= config.steps_per_iteration:
        raise ConfigError(
            f"total_steps={smallest:.0f} does not allow one iteration of num_envs * num_steps = "
            f"{config.steps_per_iteration} environment steps; {_smaller_iteration(config, int(max(smallest, 0)))}"
        )
    if not max_episodes >= 1:
        raise ConfigError(f"max_episodes={max_episodes} does not allow one iteration; leave it out for no limit")
    largest = float(np.max(hyperparams.total_steps))
    if _MOST_UNITS * config.steps_per_iteration < largest < math.inf:
        raise ConfigError(
            f"total_steps={largest:g} is more than 2^31 iterations; use fewer, or inf beside max_episodes"
        )
    if largest == math.inf:
        cut = not config.algorithm.start.auto_reset and config.num_steps < config.env.max_steps
        if max_episodes == math.inf or cut:
            why = "episodes that are cut off need never end" if cut else "there is no max_episodes"
            raise ConfigError(f"total_steps=inf, and {why}, so nothing ends the run; use a number of steps")
        if most_steps(config, hyperparams, max_episodes) > _MOST_UNITS * config.steps_per_iteration:
            raise ConfigError(
                f"total_steps=inf, and max_episodes={max_episodes:g} may take more than 2^31 iterations; use fewer"
            )


def _smaller_iteration(config: Config, total_steps: int) -> str:
    """What to write for an iteration that fits the budget."""
    start, limit = config.algorithm.start, config.env.max_steps
    if not start.from_reset or config.num_steps < limit:
        return "raise total_steps or lower num_envs or num_steps"
    continuing = ", ".join(name for name, algorithm in ALGORITHMS.items() if algorithm.start.auto_reset)
    advice = [f"an algorithm whose episodes continue across rollouts (--algorithm auto; {continuing})"]
    if num_envs := total_steps // limit // config.group_size * config.group_size:
        advice.append(f"num_envs={num_envs} or fewer")
    if max_steps := total_steps // config.num_envs:
        advice.append(f"env_params with max_steps_in_episode={max_steps} or less")
    return (
        f"one-episode groups play to the episode limit of {config.env.name}, {limit} steps; raise total_steps, or use "
        f"{', or '.join(advice)}"
    )


def most_steps(config: Config, hyperparams: Hyperparams, max_episodes: float = math.inf) -> int:
    """The most environment steps that a row may make.

    Its budget of steps or, if that is infinite, `max_episodes` times the longest episode that the environment allows.
    """
    total_steps = float(np.max(hyperparams.total_steps))
    if total_steps < math.inf:
        return int(total_steps)
    rollouts_per_episode = max(1.0, config.env.max_steps / config.num_steps)
    num_iterations = math.ceil(math.ceil(max_episodes / config.num_envs) * rollouts_per_episode)
    return num_iterations * config.steps_per_iteration

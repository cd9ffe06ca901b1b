"""Whole episodes under fixed parameters."""

from typing import NamedTuple

import jax

from grpo_jax.config import Config
from grpo_jax.groups import fresh_groups
from grpo_jax.rollout import unroll
from grpo_jax.types import TrainState


class Evaluation(NamedTuple):
    """Episodes played."""

    returns: jax.Array  # [num_episodes] undiscounted
    lengths: jax.Array  # [num_episodes] int32


def evaluate(
    config: Config, state: TrainState, key: jax.Array, *, num_episodes: int = 128, greedy: bool = False
) -> Evaluation:
    """Plays `num_episodes` whole episodes from independent resets. Pure: `jit` it, `vmap` it over states and keys.

    Args:
      config: of the run that `state` comes from.
      state: whose parameters act; it is not changed.
      key: of the resets, the environment and the actions.
      num_episodes: how many.
      greedy: take the most probable actions in place of samples.
    """
    key_reset, key_rollout = jax.random.split(key)
    start = fresh_groups(None, config.policy, config.env, key_reset, num_episodes, group_size=1)
    end, _ = unroll(
        config.policy,
        config.env,
        state.params,
        start,
        key_rollout,
        num_steps=config.env.max_steps,
        auto_reset=False,
        greedy=greedy,
    )
    return Evaluation(returns=end.episode_return, lengths=end.episode_length)

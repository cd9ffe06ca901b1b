"""Where the groups of a rollout start."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.environments import Environment
from grpo_jax.networks import Policy
from grpo_jax.types import RolloutState


class Start(NamedTuple):
    """How a rollout begins, and what follows an episode's end in it."""

    begin: Callable  # (state or None, policy, environment, key, num_envs, group_size) -> RolloutState
    auto_reset: bool  # False: one episode a rollout, masked after its end


def fresh_groups(
    state: RolloutState | None,
    policy: Policy,
    environment: Environment,
    key: jax.Array,
    num_envs: int,
    group_size: int,
) -> RolloutState:
    """One reset for each group, copied to its members, which therefore start bitwise equal. `state` is dropped."""
    keys = jax.random.split(key, num_envs // group_size)
    start, observation = jax.tree.map(
        lambda leaf: jnp.repeat(leaf, group_size, axis=0), jax.vmap(environment.reset)(keys)
    )
    return RolloutState(
        environment=start,
        observation=observation,
        policy_carry=policy.initial_carry(num_envs),
        episode_return=jnp.zeros(num_envs),
        episode_length=jnp.zeros(num_envs, jnp.int32),
    )


def continue_episodes(
    state: RolloutState,
    policy: Policy,
    environment: Environment,
    key: jax.Array,
    num_envs: int,
    group_size: int,
) -> RolloutState:
    """Every environment goes on from where it stands."""
    return state


def first_members(num_envs: int, group_size: int) -> jax.Array:
    """`[num_envs]` bool: the first member of each group."""
    return jnp.arange(num_envs) % group_size == 0


FRESH = Start(begin=fresh_groups, auto_reset=False)
"""One-episode groups: `group_size` copies of one reset state, each played to its end."""

CONTINUE = Start(begin=continue_episodes, auto_reset=True)
"""Environments run on across iterations, as PPO has them."""

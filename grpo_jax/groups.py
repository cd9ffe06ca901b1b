"""Where the groups of a rollout start."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.environments import Environment
from grpo_jax.networks import Policy
from grpo_jax.types import PyTree, RolloutState, Trajectory


class Start(NamedTuple):
    """How a rollout begins, and what follows an episode's end in it."""

    begin: Callable  # (state, policy, params, environment, key, num_envs, group_size) -> RolloutState
    auto_reset: bool  # False: one episode a rollout, masked after its end


def fresh_groups(
    state: RolloutState,
    policy: Policy,
    params: PyTree,
    environment: Environment,
    key: jax.Array,
    num_envs: int,
    group_size: int,
) -> RolloutState:
    """Every group starts anew, under its own environment parameters. Nothing else of `state` is kept."""
    return reset_groups(policy, params, environment, state.environment_params, key, num_envs, group_size)


def reset_groups(
    policy: Policy,
    params: PyTree,
    environment: Environment,
    environment_params: PyTree,
    key: jax.Array,
    num_envs: int,
    group_size: int,
) -> RolloutState:
    """One reset for each group, copied to its members, which therefore start bitwise equal.

    Args:
      policy, params, environment: what will act, with which parameters, and where.
      environment_params: each leaf `[num_envs, ...]`, equal within a group (see `parameters_of_groups`).
      key: of all resets.
      num_envs, group_size: how many environments, and how many of them start from each reset.
    """
    keys = jax.random.split(key, num_envs // group_size)
    of_groups = jax.tree.map(lambda leaf: leaf[::group_size], environment_params)
    start, observation = jax.vmap(environment.reset)(keys, of_groups)
    prompt = None if environment.prompt is None else jax.vmap(environment.prompt)(start, of_groups)
    # What a policy remembers of its prompt is computed once for the group.
    carry = policy.initial_carry(params, num_envs // group_size, prompt)
    start, observation, carry = jax.tree.map(
        lambda leaf: jnp.repeat(leaf, group_size, axis=0), (start, observation, carry)
    )
    return RolloutState(
        environment=start,
        observation=observation,
        policy_carry=carry,
        episode_return=jnp.zeros(num_envs),
        episode_length=jnp.zeros(num_envs, jnp.int32),
        environment_params=environment_params,
    )


def continue_episodes(
    state: RolloutState,
    policy: Policy,
    params: PyTree,
    environment: Environment,
    key: jax.Array,
    num_envs: int,
    group_size: int,
) -> RolloutState:
    """Every environment goes on from where it stands."""
    return state


def one_carry_per_group(trajectory: Trajectory, group_size: int) -> Trajectory:
    """Keeps what the policy remembered before the first step once for each group, whose members began as one."""
    return trajectory._replace(carry=jax.tree.map(lambda leaf: leaf[:, ::group_size], trajectory.carry))


def first_members(num_envs: int, group_size: int) -> jax.Array:
    """`[num_envs]` bool: the first member of each group."""
    return jnp.arange(num_envs) % group_size == 0


FRESH = Start(begin=fresh_groups, auto_reset=False)
"""One-episode groups: `group_size` copies of one reset state, each played to its end."""

CONTINUE = Start(begin=continue_episodes, auto_reset=True)
"""Environments run on across iterations, as PPO has them."""

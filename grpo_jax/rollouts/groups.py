"""Groups lie side by side: member i of group g is environment g * group_size + i."""

import jax
import jax.numpy as jnp

from grpo_jax.environments import Environment
from grpo_jax.environments.environment import threefry
from grpo_jax.policies import Policy
from grpo_jax.rollouts.rollout import begun_episodes
from grpo_jax.types import PyTree, RolloutState, Trajectory


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
      environment_params: each leaf `[num_envs, ...]`, equal within a group (see `group_parameters`).
      key: of all resets.
      num_envs, group_size: how many environments, and how many of them start from each reset.
    """
    keys = jax.random.split(threefry(key), num_envs // group_size)
    of_groups = jax.tree.map(lambda leaf: leaf[::group_size], environment_params)
    start, observation = jax.vmap(environment.reset)(keys, of_groups)
    prompt = None if environment.prompt is None else jax.vmap(environment.prompt)(start, of_groups)
    # What a policy remembers of its prompt is computed once for the group.
    carry = policy.initial_carry(params, num_envs // group_size, prompt)
    return copied(begun_episodes(start, observation, carry, environment_params=of_groups), group_size)


def copied(states: RolloutState, group_size: int) -> RolloutState:
    """`[num_groups, ...]` to `[num_groups * group_size, ...]`: each state as often as its group has members."""
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, group_size, axis=0), states)


def one_carry_per_group(trajectory: Trajectory, group_size: int) -> Trajectory:
    """Keeps what the policy remembered before the first step once for each group, whose members began as one."""
    return trajectory._replace(carry=jax.tree.map(lambda leaf: leaf[:, ::group_size], trajectory.carry))


def first_members(num_envs: int, group_size: int) -> jax.Array:
    """`[num_envs]` bool: the first member of each group."""
    return jnp.arange(num_envs) % group_size == 0

"""Groups side by side: member i of group g is environment g * group_size + i."""

import jax
import jax.numpy as jnp

from grpo_jax.types import RolloutState, Trajectory


def copy_to_members(states: RolloutState, group_size: int) -> RolloutState:
    """`[num_groups, ...]` to `[num_groups * group_size, ...]`: each state once for each member of its group."""
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, group_size, axis=0), states)


def one_carry_per_group(trajectory: Trajectory, group_size: int) -> Trajectory:
    """Keeps the carry before the first step, which the members of a group share, once for each group."""
    return trajectory._replace(carry=jax.tree.map(lambda leaf: leaf[:, ::group_size], trajectory.carry))


def first_members(num_envs: int, group_size: int) -> jax.Array:
    """`[num_envs]` bool: the first member of each group."""
    return jnp.arange(num_envs) % group_size == 0

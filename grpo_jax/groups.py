"""Groups side by side, and where they start: at a reset, or at a state that the policy itself reached.

Member i of group g is environment g * group_size + i.

FRESH      at a reset, one for each group; each member plays one episode
CONTINUE   at the state of each environment; there are no groups
ANCHORED   at the state of one member, to which all members of its group are set
forked(8)  at the state that one environment of the group, its trunk, reaches after 8 more steps; copies of it are
           played and then discarded, and the trunk goes on from there
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.errors import as_count
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


def copy_member(state: RolloutState, member: jax.Array, group_size: int) -> RolloutState:
    """Every environment at the state of one member of its group: number `member[g]`, int `[num_groups]`."""
    source = jnp.repeat(jnp.arange(0, state.num_envs, group_size) + member, group_size)
    return jax.tree.map(lambda leaf: leaf[source], state)


def keep_end(begun: RolloutState, ended: RolloutState) -> RolloutState:
    """The next rollout starts from the end of this one."""
    return ended


def keep_begin(begun: RolloutState, ended: RolloutState) -> RolloutState:
    """The next rollout starts from the beginning of this one, whose steps are discarded."""
    return begun


class Start(NamedTuple):
    """The state that a rollout begins from, the state kept for the next rollout, and whether episodes follow others."""

    begin: Callable  # (simulator, state kept, key, group_size) -> RolloutState: see `rollouts.rollout.Simulator`
    keep: Callable = keep_end  # (state begun from, state ended in) -> RolloutState to keep
    auto_reset: bool = True  # False: one episode a rollout, masked after its end
    grouped: bool = True  # members of a group start from the same state
    trunk_steps: int = 0  # environment steps that `begin` makes for each group

    @property
    def from_reset(self) -> bool:
        """Every rollout begins with new episodes."""
        return not (self.auto_reset or self.trunk_steps)


def fresh_groups(simulator: Any, state: RolloutState, key: jax.Array, group_size: int) -> RolloutState:
    """Every group starts from its own reset. Only the parameters of the environments are taken from `state`."""
    return simulator.reset(state.environment_params, key, state.num_envs, group_size=group_size)


def continue_episodes(simulator: Any, state: RolloutState, key: jax.Array, group_size: int) -> RolloutState:
    """Every environment continues from its own state."""
    return state


def anchored_groups(simulator: Any, state: RolloutState, key: jax.Array, group_size: int) -> RolloutState:
    """Every member of a group continues from the state of one of them, drawn uniformly.

    All members are equally likely to be drawn, so the states that groups start from have the same distribution as
    in environments that continue without groups.
    """
    return copy_member(state, jax.random.randint(key, (state.num_envs // group_size,), 0, group_size), group_size)


class Forks(NamedTuple):
    """`begin` of forked groups: the first environment of each group is its trunk."""

    trunk_steps: int

    def __call__(self, simulator: Any, state: RolloutState, key: jax.Array, group_size: int) -> RolloutState:
        """The trunks' states after `trunk_steps`, copied to their groups."""
        trunks = jax.tree.map(lambda leaf: leaf[::group_size], state)
        trunks, _ = simulator.unroll(trunks, key, num_steps=self.trunk_steps, auto_reset=True)
        return copy_to_members(trunks, group_size)


def forked(trunk_steps: int) -> Start:
    """Groups that split off a trunk every `trunk_steps` steps (TRPO's vine).

    The branches are played for `num_steps`, or to the end of their episode, and discarded; the trunk continues from the
    state where they split off. Its steps count in the budget: `trunk_steps` for each group in each iteration.

    Vine: https://arxiv.org/abs/1502.05477; the same for language models, VinePPO: https://arxiv.org/abs/2410.01679.

    Args:
      trunk_steps: steps of each trunk between two forks; 1 or more.
    """
    trunk_steps = as_count("trunk_steps", trunk_steps, "otherwise the same state is forked in every iteration")
    forks = Forks(trunk_steps)
    return Start(forks, keep_begin, auto_reset=False, trunk_steps=trunk_steps)


def _keep_without_carry(begun: RolloutState, ended: RolloutState) -> RolloutState:
    """The policy's carry is dropped, since every rollout starts from a reset."""
    return ended._replace(policy_carry=())


FRESH = Start(fresh_groups, _keep_without_carry, auto_reset=False)
"""One-episode groups: `group_size` copies of one reset state, each played to its end."""

CONTINUE = Start(continue_episodes, grouped=False)
"""Environments run on across iterations, as in PPO."""

ANCHORED = Start(anchored_groups)
"""Environments run on across iterations; at the start of each window a group gathers at the state of one member."""

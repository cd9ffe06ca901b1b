"""Where the groups of a rollout start: at a reset, or at a state that the policy itself reached.

FRESH      at a reset, one for each group; each member plays one episode
CONTINUE   nowhere: there are no groups, and every environment goes on from where it stands
ANCHORED   where one of the members stands; all members of the group go on from there
forked(8)  where the group's trunk stands after 8 more steps; its branches are played and forgotten
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.errors import as_count
from grpo_jax.objectives.returns import discounted_returns
from grpo_jax.rollouts.groups import copy_to_members
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.types import RolloutState


class Start(NamedTuple):
    """Where a rollout begins, what is kept of it for the next one, and whether its episodes follow each other."""

    begin: Callable  # (simulator, state, key, group_size) -> RolloutState: where it begins, given the state kept
    keep: Callable  # (begun, ended) -> RolloutState: what to keep, given where the rollout began and where it ended
    auto_reset: bool  # False: one episode a rollout, masked after its end
    grouped: bool  # members of a group start from the same state
    trunk_steps: int = 0  # environment steps that `begin` makes for each group
    all_actions: bool = False  # member i of a group begins with action i


def fresh_groups(simulator: Simulator, state: RolloutState, key: jax.Array, group_size: int) -> RolloutState:
    """Every group starts from a reset of its own. Of `state` only the environments' parameters are kept."""
    return simulator.reset(state.environment_params, key, state.num_envs, group_size=group_size)


def continue_episodes(simulator: Simulator, state: RolloutState, key: jax.Array, group_size: int) -> RolloutState:
    """Every environment goes on from where it stands."""
    return state


def anchored_groups(simulator: Simulator, state: RolloutState, key: jax.Array, group_size: int) -> RolloutState:
    """Every member of a group goes on from where one of them, drawn uniformly, stands.

    All members are equally likely to be drawn, so the states that groups start from keep the policy's own state
    distribution: the one of environments that simply go on.
    """
    num_envs = state.num_envs
    anchor = jax.random.randint(key, (num_envs // group_size,), 0, group_size)
    taken = jnp.repeat(jnp.arange(0, num_envs, group_size) + anchor, group_size)
    return jax.tree.map(lambda leaf: leaf[taken], state)


class Forks(NamedTuple):
    """`begin` of forked groups: the first environment of each group is its trunk, which goes on and splits."""

    trunk_steps: int

    def __call__(self, simulator: Simulator, state: RolloutState, key: jax.Array, group_size: int) -> RolloutState:
        """The trunks' states after `trunk_steps`, copied to their groups."""
        trunks = jax.tree.map(lambda leaf: leaf[::group_size], state)
        trunks, _ = simulator.unroll(trunks, key, num_steps=self.trunk_steps, auto_reset=True)
        return copy_to_members(trunks, group_size)


def forked(trunk_steps: int, *, all_actions: bool = False) -> Start:
    """Groups that split off a trunk every `trunk_steps` steps, wherever the policy is by then (TRPO's vine).

    The branches are played for `num_steps`, or to the end of their episode, and forgotten; the trunk goes on from where
    it split. Its steps count in the budget: `trunk_steps` for each group in each iteration.

    Vine: https://arxiv.org/abs/1502.05477; the same for language models, VinePPO: https://arxiv.org/abs/2410.01679.

    Args:
      trunk_steps: of each trunk between two forks; 1 or more.
      all_actions: the group is one of *actions at one state*: member i begins with action i, so `group_size` is the
        number of actions. See `all_actions_advantage`.
    """
    trunk_steps = as_count("trunk_steps", trunk_steps, "without a lead the same state is forked for ever")
    return Start(
        Forks(trunk_steps),
        _where_it_began,
        auto_reset=False,
        grouped=True,
        trunk_steps=trunk_steps,
        all_actions=all_actions,
    )


def monte_carlo_values(
    simulator: Simulator, state: RolloutState, key: jax.Array, *, num_branches: int, num_steps: int
) -> jax.Array:
    """Values of states, estimated by playing on from each: V(s) = mean over branches of sum_t discount^t r_t.

    Unbiased but for what `num_steps` cuts off, and without a critic (VinePPO, https://arxiv.org/abs/2410.01679). It
    costs `num_branches * num_steps` environment steps for each state.

    Args:
      simulator: what plays on, with its discount.
      state: where `B` environments stand; it stays as it is.
      key: of all randomness.
      num_branches: how often each state is played on from.
      num_steps: the most steps of a branch, which ends with its episode.

    Returns:
      `[B]`, in the units of the rewards.
    """
    branches = copy_to_members(state, num_branches)
    _, trajectory = simulator.unroll(branches, key, num_steps=num_steps, auto_reset=False)
    returns = discounted_returns(trajectory.reward, trajectory.ended, discount=simulator.discount)[0]
    return jnp.mean(returns.reshape(-1, num_branches), axis=1)


def _where_it_began(begun: RolloutState, ended: RolloutState) -> RolloutState:
    return begun


def _where_it_ended(begun: RolloutState, ended: RolloutState) -> RolloutState:
    return ended


def _without_memory(begun: RolloutState, ended: RolloutState) -> RolloutState:
    """The policy's memory is not kept, since every rollout starts from a reset."""
    return ended._replace(policy_carry=())


FRESH = Start(fresh_groups, _without_memory, auto_reset=False, grouped=True)
"""One-episode groups: `group_size` copies of one reset state, each played to its end."""


CONTINUE = Start(continue_episodes, _where_it_ended, auto_reset=True, grouped=False)
"""Environments run on across iterations, as PPO has them."""


ANCHORED = Start(anchored_groups, _where_it_ended, auto_reset=True, grouped=True)
"""Environments run on across iterations; at the start of each window a group gathers at the state of one member."""

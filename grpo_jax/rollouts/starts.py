"""Where the groups of a rollout start: at a reset, or at any state that the policy itself came to.

FRESH      one reset for each group; its members play one episode
CONTINUE   no groups: every environment goes on from where it stands
ANCHORED   environments go on, the members of a group from the state of one of them
forked(8)  a trunk for each group goes on by 8 steps and splits; its branches are played and forgotten
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.environments import Environment
from grpo_jax.errors import as_count
from grpo_jax.objectives.returns import discounted_returns
from grpo_jax.policies import Policy
from grpo_jax.rollouts.groups import copied, reset_groups
from grpo_jax.rollouts.rollout import unroll
from grpo_jax.types import PyTree, RolloutState


class Start(NamedTuple):
    """How a rollout begins, what follows an episode's end in it, and what is kept for the next."""

    begin: Callable  # (state, policy, params, environment, key, num_envs, group_size, discount) -> RolloutState
    keep: Callable  # (where the rollout began, where it ended) -> where the next one begins from
    auto_reset: bool  # False: one episode a rollout, masked after its end
    grouped: bool  # members of a group start from the same state
    trunk_steps: int = 0  # environment steps that `begin` makes for each group
    all_actions: bool = False  # member i of a group begins with action i


def fresh_groups(
    state: RolloutState,
    policy: Policy,
    params: PyTree,
    environment: Environment,
    key: jax.Array,
    num_envs: int,
    group_size: int,
    discount: jax.Array | float = 1.0,
) -> RolloutState:
    """Every group starts anew, under its own environment parameters. Nothing else of `state` is kept."""
    return reset_groups(policy, params, environment, state.environment_params, key, num_envs, group_size)


def continue_episodes(
    state: RolloutState,
    policy: Policy,
    params: PyTree,
    environment: Environment,
    key: jax.Array,
    num_envs: int,
    group_size: int,
    discount: jax.Array | float = 1.0,
) -> RolloutState:
    """Every environment goes on from where it stands."""
    return state


def anchored_groups(
    state: RolloutState,
    policy: Policy,
    params: PyTree,
    environment: Environment,
    key: jax.Array,
    num_envs: int,
    group_size: int,
    discount: jax.Array | float = 1.0,
) -> RolloutState:
    """Every member of a group goes on from where one of them stands, which is drawn uniformly.

    Each member's place is as likely to be taken, so that the states at which groups start have the distribution of
    those at which environments stand that just go on: the policy's own.
    """
    anchor = jax.random.randint(key, (num_envs // group_size,), 0, group_size)
    taken = jnp.repeat(jnp.arange(0, num_envs, group_size) + anchor, group_size)
    return jax.tree.map(lambda leaf: leaf[taken], state)


class Forks(NamedTuple):
    """`begin` of forked groups: the first environment of each is its trunk, which goes on and splits."""

    trunk_steps: int

    def __call__(
        self,
        state: RolloutState,
        policy: Policy,
        params: PyTree,
        environment: Environment,
        key: jax.Array,
        num_envs: int,
        group_size: int,
        discount: jax.Array | float = 1.0,
    ) -> RolloutState:
        """The trunks' states after `trunk_steps`, copied to their groups."""
        trunks = jax.tree.map(lambda leaf: leaf[::group_size], state)
        trunks, _ = unroll(
            policy, environment, params, trunks, key, num_steps=self.trunk_steps, auto_reset=True, discount=discount
        )
        return copied(trunks, group_size)


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
    state: RolloutState,
    policy: Policy,
    params: PyTree,
    environment: Environment,
    key: jax.Array,
    *,
    num_branches: int,
    num_steps: int,
    discount: jax.Array | float,
) -> jax.Array:
    """What it is worth to stand somewhere, by playing on from there: V(s) = mean over branches of sum_t discount^t r_t.

    No bias but what `num_steps` cuts off, and no critic (VinePPO, https://arxiv.org/abs/2410.01679). It costs
    `num_branches * num_steps` environment steps for each state.

    Args:
      state: where `B` environments stand; it stays as it is.
      policy, params, environment: what acts, with which parameters, and where.
      key: of all randomness.
      num_branches, num_steps: how often each state is played on from, and for how long at most.
      discount: in [0, 1].

    Returns:
      `[B]`, in the units of the rewards.
    """
    _, branches = unroll(
        policy, environment, params, copied(state, num_branches), key, num_steps=num_steps, auto_reset=False
    )
    returns = discounted_returns(branches.reward, branches.ended, discount=discount)[0]
    return jnp.mean(returns.reshape(-1, num_branches), axis=1)


def _where_it_began(begun: RolloutState, ended: RolloutState) -> RolloutState:
    return begun


def _where_it_ended(begun: RolloutState, ended: RolloutState) -> RolloutState:
    return ended


def _without_memory(begun: RolloutState, ended: RolloutState) -> RolloutState:
    """One-episode groups start anew, so nothing of what the policy remembers."""
    return ended._replace(policy_carry=())


FRESH = Start(fresh_groups, _without_memory, auto_reset=False, grouped=True)
"""One-episode groups: `group_size` copies of one reset state, each played to its end."""


CONTINUE = Start(continue_episodes, _where_it_ended, auto_reset=True, grouped=False)
"""Environments run on across iterations, as PPO has them."""


ANCHORED = Start(anchored_groups, _where_it_ended, auto_reset=True, grouped=True)
"""Environments run on across iterations; at the start of each window a group gathers at the state of one member."""

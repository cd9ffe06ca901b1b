"""Final observations: those after the last step of an episode or rollout, whose values are needed for bootstrapping.

They are the true final observation of each truncated episode, and the observations after the last step. An episode is
truncated at `max_steps` and no earlier, so within `num_steps` that happens at most ceil(num_steps / max_steps) times.
That many are kept for each environment, with the policy's carry, and valued in one pass after the rollout. If an
environment truncates more often, the missing values are NaN: no update is better than a wrong one.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.environments import Environment
from grpo_jax.rollouts.resets import select
from grpo_jax.types import PyTree, RolloutState


def num_finals(environment: Environment, num_steps: int, auto_reset: bool) -> int:
    """The most final observations that an environment has in a rollout.

    One after the last step and, with `auto_reset`, one for each episode that can be truncated. Without it the final
    observation of an episode stays, and the next step starts from it.
    """
    return 1 + (-(-num_steps // environment.max_steps) if auto_reset else 0)


class Truncations(NamedTuple):
    """The final observations of the episodes that were truncated so far in a rollout; `S` slots an environment."""

    slots: PyTree  # (observation, carry of the policy), each leaf [B, S, ...], in the order of truncation
    count: jax.Array  # [B] int32; truncations beyond the last slot are counted but not kept

    @classmethod
    def none(cls, num_slots: int, state: RolloutState) -> "Truncations":
        """Empty slots for observations and carries as in `state`."""

        def empty(leaf):
            return jnp.zeros((leaf.shape[0], num_slots, *leaf.shape[1:]), leaf.dtype)

        return cls(jax.tree.map(empty, (state.observation, state.policy_carry)), jnp.zeros(state.num_envs, jnp.int32))

    def add(self, truncated: jax.Array, state: RolloutState) -> "Truncations":
        """Adds the observations in `state` of the environments that are `truncated` at this step, `[B]` bool."""
        num_slots = jax.tree.leaves(self.slots)[0].shape[1]
        is_next = truncated[:, None] & (self.count[:, None] == jnp.arange(num_slots)[None])
        new = jax.tree.map(lambda leaf: leaf[:, None], (state.observation, state.policy_carry))
        return Truncations(select(is_next, new, self.slots), self.count + truncated)

    def and_last(self, state: RolloutState) -> PyTree:
        """Observations and carries, each leaf `[S + 1, B, ...]`: the slots, and then those in `state`."""
        last = (state.observation, state.policy_carry)
        both = jax.tree.map(lambda many, one: jnp.concatenate([many, one[:, None]], axis=1), self.slots, last)
        return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), both)

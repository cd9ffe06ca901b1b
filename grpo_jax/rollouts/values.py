"""Log-probabilities and the critic's values of a trajectory, computed after its steps.

Bootstrapping needs the values of final observations: the true last one of each truncated episode, and those after the
last step. Where an episode is truncated at `max_steps` alone, that happens at most ceil(num_steps / max_steps) times
within `num_steps`. That many are kept for each environment, with the policy's carry, and valued in one pass after the
rollout. With `truncates_early` each step values its next observation instead.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.devices.mesh import on_own_environments
from grpo_jax.objectives.returns import next_values
from grpo_jax.policies import Policy
from grpo_jax.rollouts.resets import select
from grpo_jax.rollouts.scan import block_length
from grpo_jax.types import PyTree, RolloutState, Trajectory


class Truncations(NamedTuple):
    """The final observations of the episodes that were truncated so far in a rollout; `S` slots an environment."""

    slots: PyTree  # (observation, carry of the policy), each leaf [B, S, ...], in the order of truncation
    count: jax.Array  # [B] int32; truncations beyond the last slot are counted but not kept

    @classmethod
    def none(cls, num_slots: int, state: RolloutState) -> "Truncations":
        """Empty slots for observations and carries as in `state`."""

        def empty(x):
            return jnp.zeros((x.shape[0], num_slots, *x.shape[1:]), x.dtype)

        return cls(jax.tree.map(empty, (state.observation, state.policy_carry)), jnp.zeros(state.num_envs, jnp.int32))

    def add(self, truncated: jax.Array, state: RolloutState) -> "Truncations":
        """Adds the observations in `state` of the environments that are `truncated` at this step, `[B]` bool."""
        num_slots = jax.tree.leaves(self.slots)[0].shape[1]
        is_next = truncated[:, None] & (self.count[:, None] == jnp.arange(num_slots)[None])
        new = jax.tree.map(lambda x: x[:, None], (state.observation, state.policy_carry))
        return Truncations(select(is_next, new, self.slots), self.count + truncated.astype(jnp.int32))


def cut_at_divergence(trajectory: Trajectory) -> Trajectory:
    """A rollout `[T, B]` in which an environment's steps end before it diverges, with a truncation if it had begun.

    The next value of the last valid step is then that of the last finite state, in which the discarded step began.
    """
    diverged = trajectory.diverged
    before = jnp.cumsum(diverged, axis=0) == 0
    last = diverged & (trajectory.episode_length > 0)  # the episode has earlier steps
    last = jnp.concatenate([last[1:], jnp.zeros_like(last[:1])])
    return trajectory._replace(
        reward=jnp.where(before, trajectory.reward, 0.0),
        terminated=trajectory.terminated & before,
        truncated=(trajectory.truncated | last) & before,
        valid=trajectory.valid & before,
    )


def with_values(policy: Policy, params: PyTree, trajectory: Trajectory, carry: PyTree, num_passes: int) -> Trajectory:
    """Adds log-probabilities and, with a critic, its values.

    Args:
      policy, params: that acted; a policy without a carry.
      trajectory: `[T, B]`.
      carry: of the policy, without leaves.
      num_passes: the values take so many passes through the network, or more.
    """
    log_prob = policy.distribution.log_prob(trajectory.distribution, trajectory.action)
    trajectory = trajectory._replace(log_prob=log_prob)
    if not policy.has_critic:
        return trajectory
    num_steps = len(trajectory.reward)
    num_rows = block_length(num_steps, max(num_steps // num_passes, 1))
    rows = jax.tree.map(lambda x: x.reshape(-1, num_rows, *x.shape[1:]), trajectory.observation)

    def values(params, steps):
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), steps)
        return policy.step(params, flat, carry)[1].reshape(num_rows, -1)

    value = jax.lax.map(functools.partial(on_own_environments(values, axis=1), params), rows)
    return trajectory._replace(value=value.reshape(trajectory.reward.shape))


def with_final_values(
    policy: Policy,
    params: PyTree,
    trajectory: Trajectory,
    truncations: Truncations | None,
    end: RolloutState,
    keep: bool,
) -> Trajectory:
    """Adds the critic's next values, if there is a critic, and the final observations, if they are to be kept.

    Args:
      policy, params: that acted.
      trajectory: `[T, B]`, with the critic's values.
      truncations, end: have the final observations: those of the truncations, and then that after the last step.
      keep: whether to keep them in the trajectory, each leaf `[S + 1, B, ...]`.
    """
    observation, carry = jax.tree.map(lambda x: x[None], (end.observation, end.policy_carry))
    if truncations is not None:
        slots = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), truncations.slots)
        observation, carry = jax.tree.map(lambda *both: jnp.concatenate(both), slots, (observation, carry))
    value = None
    if policy.has_critic:
        value = jax.vmap(lambda *final: policy.step(params, *final)[1])(observation, carry)
        if trajectory.next_value is None:
            trajectory = trajectory._replace(next_value=next_values(trajectory.value, value, trajectory.truncated))
    if keep:
        trajectory = trajectory._replace(final_observation=observation, final_value=value)
    return trajectory

"""Log-probabilities and the critic's values of a trajectory, computed after the steps."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from grpo_jax.devices.mesh import envs_are_split
from grpo_jax.objectives.returns import next_values
from grpo_jax.policies import Policy
from grpo_jax.types import PyTree, Trajectory


def with_values(policy: Policy, params: PyTree, trajectory: Trajectory, carry: PyTree, num_passes: int) -> Trajectory:
    """Adds log-probabilities and, with a critic, its values.

    Args:
      policy, params: that acted; a policy without a carry.
      trajectory: `[T, B]`.
      carry: of the policy before the first step, without leaves.
      num_passes: the values take so many passes through the network, or more.
    """
    log_prob = policy.distribution.log_prob(trajectory.distribution, trajectory.action)
    trajectory = trajectory._replace(log_prob=log_prob)
    if not policy.has_critic:
        return trajectory
    num_steps, num_envs = trajectory.reward.shape
    most = max(num_steps // num_passes, 1)
    num_rows = max(number for number in range(1, most + 1) if num_steps % number == 0)
    rows = (-1, num_rows)
    observations = jax.tree.map(lambda leaf: leaf.reshape(*rows, *leaf.shape[1:]), trajectory.observation)
    is_first = jnp.zeros((num_rows, num_envs), bool)  # without a carry nothing depends on it

    def values(rows, carry, is_first):
        return policy.sequence(params, rows, carry, is_first)[1]

    if envs_are_split():
        # One flat batch of all environments would be gathered on every device.
        values = _over_envs(values)
    value = jax.lax.map(lambda rows: values(rows, carry, is_first), observations)
    return trajectory._replace(value=value.reshape(num_steps, num_envs))


def with_final_values(
    policy: Policy, params: PyTree, trajectory: Trajectory, observation: PyTree, carry: PyTree, *, keep: bool
) -> Trajectory:
    """Adds the critic's next values, if there is a critic, and the final observations, if they are to be kept.

    Args:
      policy, params: that acted.
      trajectory: `[T, B]`, with the critic's values.
      observation, carry: the final observations and the policy's carry at them, each leaf `[F, B, ...]`.
      keep: whether to keep them in the trajectory.
    """
    value = None
    if policy.has_critic:
        value = jax.vmap(lambda *final: policy.step(params, *final)[1])(observation, carry)
        trajectory = trajectory._replace(next_value=next_values(trajectory.value, value, trajectory.truncated))
    if keep:
        carry = policy.sequence_carry(carry)
        trajectory = trajectory._replace(final_observation=observation, final_carry=carry, final_value=value)
    return trajectory


def _over_envs(sequence: Callable) -> Callable:
    """A function of sequences `[S, B, ...]` mapped over the environments, whose carry is `[B, ...]`."""

    def one(rows, carry, is_first):
        rows, is_first = jax.tree.map(lambda leaf: leaf[:, None], (rows, is_first))
        return sequence(rows, jax.tree.map(lambda leaf: leaf[None], carry), is_first)[:, 0]

    return jax.vmap(one, in_axes=(1, 0, 1), out_axes=1)

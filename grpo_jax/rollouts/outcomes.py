"""Rewards of whole episodes: `Environment.outcome`, evaluated once, on the final states of a rollout."""

import jax
import jax.numpy as jnp

from grpo_jax.environments import Environment
from grpo_jax.errors import ConfigError
from grpo_jax.types import PyTree, RewardParts, RolloutState, Trajectory


def outcome_parts(environment: Environment, states: PyTree, params: PyTree) -> RewardParts:
    """The parts of the outcome in these states of `B` environments, float32 `[B, K]`."""
    return RewardParts(*(jnp.asarray(part, jnp.float32) for part in environment.outcome(states, params)))


def add_outcome(
    environment: Environment, auto_reset: bool, end: RolloutState, trajectory: Trajectory
) -> tuple[RolloutState, Trajectory]:
    """Adds the outcome of each environment to its last valid step, as if that step had paid it.

    The parts of the outcome follow those of the steps, and are 0 at all other steps.

    Args:
      environment: without an outcome nothing changes.
      auto_reset: whether another episode followed the end of one.
      end: the state after the rollout, with the parameters of the environments.
      trajectory: `[T, B]`.

    Raises:
      ConfigError: the environment has an outcome, but resets replaced the final states of its episodes.
    """
    if environment.outcome is None:
        return end, trajectory
    if auto_reset:
        raise ConfigError(
            f"{environment.name!r} rewards whole episodes (it has an outcome), but auto_reset=True starts the next "
            "episode instead of keeping the final state; use auto_reset=False"
        )
    parts = outcome_parts(environment, end.environment, end.environment_params)
    reward = parts.total
    is_last = jnp.arange(trajectory.valid.shape[0])[:, None] == jnp.sum(trajectory.valid, axis=0) - 1

    def paid(rewards):
        return rewards + jnp.where(is_last, reward, 0.0)

    shape = (*is_last.shape, parts.values.shape[-1])
    at_last = RewardParts(
        values=jnp.where(is_last[..., None], parts.values, 0.0), weights=jnp.broadcast_to(parts.weights, shape)
    )
    if trajectory.reward_parts is not None:
        at_last = jax.tree.map(lambda *both: jnp.concatenate(both, axis=-1), trajectory.reward_parts, at_last)
    trajectory = trajectory._replace(
        reward=paid(trajectory.reward),
        episode_return=paid(trajectory.episode_return),
        discounted_return=paid(trajectory.discounted_return),
        reward_parts=at_last,
    )
    end = end._replace(episode_return=end.episode_return + reward, discounted_return=end.discounted_return + reward)
    return end, trajectory

"""Rewards known at the end of an episode: `Environment.outcome`, evaluated once, on the final states of a rollout."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.environments import Environment
from grpo_jax.errors import ConfigError, are_alike, describe_arrays
from grpo_jax.types import RewardParts, RolloutState, Trajectory


class _Payment(NamedTuple):
    """The reward that an outcome adds to a trajectory, and the returns up to each step and at the end."""

    parts: RewardParts  # [T, B, K]
    reward: jax.Array  # [T, B]
    episode_return: jax.Array  # [T, B]
    discounted_return: jax.Array  # [T, B]
    total: jax.Array  # [B], undiscounted
    discounted_total: jax.Array  # [B]


def outcome_return(environment: Environment, end: RolloutState) -> jax.Array:
    """The sum of the rewards `[B]` that the outcome adds to the episodes with these final states."""
    reward = _evaluate(environment, end).total
    if reward.ndim == 1:
        return reward
    return jnp.sum(reward, axis=1, where=jnp.arange(reward.shape[1]) < end.episode_length[:, None])


def add_outcome(
    environment: Environment, discount: jax.Array | float, auto_reset: bool, end: RolloutState, trajectory: Trajectory
) -> tuple[RolloutState, Trajectory]:
    """Adds the outcome of each environment to its steps, as if they had paid it.

    An outcome `[B, K]` is paid by the last valid step. Of an outcome `[B, L, K]`, where `L` is the episode limit, each
    step of the episode pays its own part. The parts of the outcome follow those of the steps.

    Args:
      environment: without an outcome nothing changes.
      discount: of `discounted_return`.
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
    parts = _evaluate(environment, end)
    is_whole = parts.values.ndim == 2
    paid = _pay_at_end(parts, trajectory) if is_whole else _pay_at_steps(parts, trajectory, discount)
    parts, before = paid.parts, trajectory.reward_parts
    if before is not None:
        joined = (jnp.concatenate(both, axis=-1) for both in zip(before[:2], parts[:2], strict=True))
        parts = RewardParts(*joined, parts.judged)
    trajectory = trajectory._replace(
        reward=trajectory.reward + paid.reward,
        episode_return=trajectory.episode_return + paid.episode_return,
        discounted_return=trajectory.discounted_return + paid.discounted_return,
        reward_parts=parts,
    )
    end = end._replace(
        episode_return=end.episode_return + paid.total,
        discounted_return=end.discounted_return + paid.discounted_total,
    )
    return end, trajectory


def _evaluate(environment: Environment, end: RolloutState) -> RewardParts:
    """The outcome in the final states of `B` environments, in float32."""
    outcome = environment.outcome(end.environment, end.environment_params)
    _check_outcome(environment, outcome, end.num_envs)
    values, weights, judged = outcome
    return RewardParts(jnp.asarray(values, jnp.float32), jnp.asarray(weights, jnp.float32), judged)


def _check_outcome(environment: Environment, outcome: RewardParts, num_envs: int) -> None:
    """Raises ConfigError unless the outcome has the shapes `[B, K]` or `[B, max_steps, K]`."""
    steps = num_envs, environment.max_steps
    if isinstance(outcome, RewardParts) and jnp.shape(outcome.values) == jnp.shape(outcome.weights):
        leading, judged = jnp.shape(outcome.values)[:-1], outcome.judged
        of_episodes = leading == (num_envs,) and judged is None
        of_steps = leading == steps and (judged is None or are_alike(judged, jax.ShapeDtypeStruct(steps, bool)))
        if of_episodes or of_steps:
            return
    raise ConfigError(
        f"the outcome of {environment.name!r} for {num_envs} environments is {describe_arrays(outcome)}; return "
        f"RewardParts(values, weights), both [{num_envs}, K], for K parts of the reward, or both "
        f"[{num_envs}, {environment.max_steps}, K], for the steps of an episode, and judged None or bool{list(steps)}"
    )


def _pay_at_end(parts: RewardParts, trajectory: Trajectory) -> _Payment:
    """All of the outcome `[B, K]` at the last valid step."""
    valid, total = trajectory.valid, parts.total
    is_last = jnp.arange(valid.shape[0])[:, None] == jnp.sum(valid, axis=0, keepdims=True) - 1
    shape = (*is_last.shape, parts.values.shape[-1])
    at_last = RewardParts(
        values=jnp.where(is_last[..., None], parts.values, 0.0), weights=jnp.broadcast_to(parts.weights, shape)
    )
    reward = jnp.where(is_last, total, 0.0)
    return _Payment(at_last, reward, reward, reward, total, total)


def _pay_at_steps(parts: RewardParts, trajectory: Trajectory, discount: jax.Array | float) -> _Payment:
    """The outcome `[B, L, K]` at the steps of the episode."""
    valid = trajectory.valid
    here = jnp.arange(valid.shape[1]), trajectory.episode_length - 1
    values = jnp.where(valid[..., None], parts.values[here], 0.0)
    judged = None if parts.judged is None else valid & parts.judged[here]
    at_steps = RewardParts(values, parts.weights[here], judged)

    def add(totals, now):
        reward, valid = now
        total, discounted = totals
        totals = total + reward, jnp.where(valid, reward + discount * discounted, discounted)
        return totals, totals

    zeros = jnp.zeros(valid.shape[1])
    totals, returns = jax.lax.scan(add, (zeros, zeros), (at_steps.total, valid))
    return _Payment(at_steps, at_steps.total, *returns, *totals)

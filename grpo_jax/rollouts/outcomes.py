"""Rewards after the steps of a rollout: the outcome of whole episodes, and the scale of all rewards.

`Environment.outcome` is known at the end of an episode. It is evaluated once, on the final states of a rollout.
"""

import jax
import jax.numpy as jnp

from grpo_jax.environments import Environment
from grpo_jax.errors import ConfigError, are_alike, describe_arrays
from grpo_jax.policies.normalization import EPS, Normalizer
from grpo_jax.types import RewardParts, RolloutState, Trajectory


def outcome_return(environment: Environment, end: RolloutState) -> jax.Array:
    """The sum of the rewards `[B]` that the outcome adds to the episodes with these final states."""
    reward = _evaluate(environment, end).total
    if reward.ndim == 1:
        return reward
    return jnp.sum(reward, axis=1, where=jnp.arange(reward.shape[1]) < end.episode_length[:, None])


def add_outcome(
    environment: Environment,
    discount: jax.Array | float,
    auto_reset: bool,
    end: RolloutState,
    trajectory: Trajectory,
    outcome: RewardParts | None = None,
) -> tuple[RolloutState, Trajectory]:
    """Adds the outcome of each environment to its steps, as if they had paid it.

    An outcome `[B, K]` is paid by the last valid step. Of an outcome `[B, L, K]`, where `L` is the episode limit, each
    step of the episode pays its own part. The outcome's parts follow the steps' own.

    Args:
      environment: without an outcome nothing changes.
      discount: of `discounted_return`.
      auto_reset: whether another episode followed the end of one.
      end: the state after the rollout, with the parameters of the environments.
      trajectory: `[T, B]`.
      outcome: by the host side; None: the environment's own.

    Raises:
      ConfigError: the environment has an outcome, but resets replaced the final states of its episodes.
    """
    if environment.outcome is None and outcome is None:
        return end, trajectory
    if auto_reset:
        raise ConfigError(
            f"{environment.name!r} rewards whole episodes (it has an outcome), but auto_reset=True starts the next "
            "episode instead of keeping the final state; use auto_reset=False"
        )
    parts = _at_steps(_evaluate(environment, end, outcome), trajectory)

    def add(totals, xs):
        reward, valid = xs
        total, discounted = totals
        totals = total + reward, jnp.where(valid, reward + discount * discounted, discounted)
        return totals, totals

    zeros = jnp.zeros(end.num_envs)
    (total, discounted), returns = jax.lax.scan(add, (zeros, zeros), (parts.total, trajectory.valid))
    trajectory = trajectory._replace(
        reward=trajectory.reward + parts.total,
        episode_return=trajectory.episode_return + returns[0],
        discounted_return=trajectory.discounted_return + returns[1],
        reward_parts=_joined(trajectory.reward_parts, parts),
    )
    end = end._replace(episode_return=end.episode_return + total, discounted_return=end.discounted_return + discounted)
    return end, trajectory


def outcome_shapes(environment: Environment, *sizes: int) -> RewardParts | None:
    """The shapes of the outcome by the host side of an environment, of so many `[B]` or `[R, B]`; None without one."""
    if environment.host is None:
        return None
    steps = (environment.max_steps,) if environment.host.in_steps else ()
    shape = *sizes, *steps, len(environment.reward_names)
    return RewardParts(*(jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.float32, jnp.float32, bool)))


def _at_steps(parts: RewardParts, trajectory: Trajectory) -> RewardParts:
    """The parts of an outcome at each step, `[T, B, K]`: all at the last valid one, or each at its own."""
    values, weights, rewarded = parts
    valid = trajectory.valid
    if values.ndim == 2:
        is_last = jnp.arange(len(valid))[:, None] == jnp.sum(valid, axis=0, keepdims=True) - 1
        values = jnp.where(is_last[..., None], values, 0.0)
        rewarded = None if rewarded is None else is_last[..., None] & rewarded
        return RewardParts(values, jnp.broadcast_to(weights, values.shape), rewarded)
    here = jnp.arange(valid.shape[1]), trajectory.episode_length - 1
    values = jnp.where(valid[..., None], values[here], 0.0)
    return RewardParts(values, weights[here], None if rewarded is None else valid[..., None] & rewarded[here])


def _joined(parts: RewardParts | None, more: RewardParts) -> RewardParts:
    """The parts of the environment's steps, if it reports them, and then the outcome's."""
    if parts is None:
        return more
    values, weights = (jnp.concatenate(both, axis=-1) for both in zip(parts[:2], more[:2], strict=True))
    if more.rewarded is None:
        return RewardParts(values, weights)
    rewarded = jnp.ones(parts.values.shape, bool) if parts.rewarded is None else parts.rewarded
    return RewardParts(values, weights, jnp.concatenate([rewarded, more.rewarded], axis=-1))


def _evaluate(environment: Environment, end: RolloutState, outcome: RewardParts | None = None) -> RewardParts:
    """The outcome in the final states of `B` environments, `[B, K]` or `[B, max_steps, K]`, in float32."""
    if outcome is None:
        outcome = environment.outcome(end.environment, end.environment_params)
    num_envs = end.num_envs
    steps = num_envs, environment.max_steps
    if isinstance(outcome, RewardParts) and jnp.shape(outcome.values) == jnp.shape(outcome.weights):
        values, weights, rewarded = outcome
        shape = jnp.shape(values)
        if rewarded is not None and jnp.shape(rewarded) == shape[:-1]:  # of all parts
            rewarded = jnp.broadcast_to(rewarded[..., None], shape)
        is_known = rewarded is None or are_alike(rewarded, jax.ShapeDtypeStruct(shape, bool))
        if is_known and shape[:-1] in ((num_envs,), steps):
            return RewardParts(jnp.asarray(values, jnp.float32), jnp.asarray(weights, jnp.float32), rewarded)
    raise ConfigError(
        f"the outcome of {environment.name!r} for {num_envs} environments is {describe_arrays(outcome)}; return "
        f"RewardParts(values, weights), both [{num_envs}, K], for K parts of the reward, or both "
        f"[{num_envs}, {environment.max_steps}, K], for the steps of an episode, and rewarded None or such bools"
    )


def scaled_rewards(normalizer: Normalizer, trajectory: Trajectory, clip: jax.Array) -> Trajectory:
    """The trajectory with rewards divided by the standard deviation of the discounted return, then clipped.

    Rewards are not centred, as that would change the optimal policy. Merge the trajectory into the statistics first:
    otherwise the first rewards of a sparse task are divided by the standard deviation of zeros.
    """
    reward = trajectory.reward
    if normalizer.discounted_return is not None:
        reward = reward * jax.lax.rsqrt(normalizer.discounted_return.variance + EPS)
    return trajectory._replace(reward=jnp.clip(reward, -clip, clip))

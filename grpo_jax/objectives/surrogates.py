"""Ratios and surrogates: how far the policy has moved, and the objective that the next update increases.

A surrogate is `surrogate(log_ratio, advantages, *, ...)`, elementwise, to be *maximised*, and is reduced elsewhere
(`losses.mean_over_steps`, ...). The log-ratio, `log_prob - behaviour_log_prob`, is what a gradient flows through;
advantages are constants. What changes the unit over which ratios are taken (a step, a sequence) is a function from
log-ratio to log-ratio, and composes with every surrogate:

    clipped_surrogate(sequence_log_ratio(log_ratio, mask), advantages, clip_low=3e-4, clip_high=4e-4)     # GSPO

At ratio 1 every surrogate has the gradient of the plain policy gradient, `advantage * d log_prob`.

Numbers may be of any type; half precision, integers and booleans are computed with as `precision` says.
"""

import chex
import jax
import jax.numpy as jnp

from grpo_jax.objectives.divergences import MAX_LOG_RATIO
from grpo_jax.precision import at_least_float32


def importance_ratio(log_ratio: jax.Array) -> jax.Array:
    """The likelihood ratio, kept finite.

        exp(clip(log_ratio, -20, 20))

    Args:
      log_ratio: any shape, in nats.

    Returns:
      The same shape, in [2e-9, 5e8]; its gradient is 0 beyond the clamp.
    """
    return jnp.exp(jnp.clip(at_least_float32(log_ratio), -MAX_LOG_RATIO, MAX_LOG_RATIO))


def sequence_log_ratio(log_ratio: jax.Array, mask: jax.Array) -> jax.Array:
    """The log of the geometric mean of a sequence's ratios, on each of its steps.

        s_i = 1/|y_i| sum_t log_ratio_it

    GSPO (https://arxiv.org/abs/2507.18071). The gradient of each step reaches all steps of its sequence.

    Args:
      log_ratio: `[T, N]`, in nats.
      mask: `[T, N]`, true on the valid steps.

    Returns:
      `[T, N]`, the same number along a sequence; 0 for a sequence without a valid step.
    """
    valid = mask.astype(bool)
    total = jnp.sum(jnp.where(valid, at_least_float32(log_ratio), 0.0), axis=0, keepdims=True)
    return jnp.broadcast_to(total / jnp.maximum(jnp.sum(valid, axis=0, keepdims=True), 1), log_ratio.shape)


def sequence_token_log_ratio(log_ratio: jax.Array, mask: jax.Array) -> jax.Array:
    """The sequence's log-ratio in value, the step's own in gradient.

        sg(s_i) + log_ratio_it - sg(log_ratio_it)

    GSPO-token (https://arxiv.org/abs/2507.18071, section 4.3): for advantages that differ along a sequence.

    Args:
      log_ratio: `[T, N]`, in nats.
      mask: `[T, N]`, true on the valid steps.

    Returns:
      `[T, N]`; 0 on invalid steps.
    """
    valid = mask.astype(bool)
    log_ratio = jnp.where(valid, at_least_float32(log_ratio), 0.0)
    constant = jax.lax.stop_gradient(sequence_log_ratio(log_ratio, mask) - log_ratio)
    return jnp.where(valid, log_ratio + constant, 0.0)


def geometric_mean(
    log_ratio: jax.Array, advantages: jax.Array, mask: jax.Array, *, clip_low: float, clip_high: float
) -> jax.Array:
    """GMPO's sequence log-ratio: the mean of log-ratios that are clipped step by step, on the side that is pessimistic.

        1/|y_i| sum_t (min(log_ratio_it, clip_high) if A_it > 0 else max(log_ratio_it, -clip_low))

    https://arxiv.org/abs/2507.20673. Its objective is `exp(.) * advantage`, reduced by `mean_of_sequence_means`, for
    advantages that are constant along a sequence.

    Args:
      log_ratio: `[T, N]`, in nats.
      advantages: `[T, N]`; only their sign is used.
      mask: `[T, N]`, true on the valid steps.
      clip_low: width in nats, >= 0 (the paper: 0.4); it clips the log-ratio, not the ratio.
      clip_high: width in nats, >= 0 (the paper: 0.4).

    Returns:
      `[T, N]`, the same number along a sequence; 0 for a sequence without a valid step.
    """
    log_ratio = at_least_float32(log_ratio)
    clipped = jnp.where(advantages > 0, jnp.minimum(log_ratio, clip_high), jnp.maximum(log_ratio, -clip_low))
    return sequence_log_ratio(clipped, mask)


def clipped_surrogate(
    log_ratio: jax.Array,
    advantages: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> jax.Array:
    """PPO's clipped objective, with a width for each side.

        min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)
        and, with `dual_clip`, at least dual_clip A where A < 0

    PPO (https://arxiv.org/abs/1707.06347); a wider upper side is DAPO's clip-higher (https://arxiv.org/abs/2503.14476);
    dual clip bounds what a large ratio does with a negative advantage (https://arxiv.org/abs/1912.09729).

    Args:
      log_ratio: any shape, in nats.
      advantages: the same shape.
      clip_low: width below 1, in [0, 1].
      clip_high: width above 1, >= 0.
      dual_clip: the largest ratio that counts where the advantage is negative, > 1 + clip_high (3 is common); `None`
        leaves it unbounded.

    Returns:
      The same shape, in the units of the advantages; its gradient is exactly 0 where the clip (or the dual clip) holds.
    """
    advantages = jax.lax.stop_gradient(at_least_float32(advantages))
    ratio = importance_ratio(log_ratio)
    objective = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages)
    if dual_clip is None:
        return objective
    return jnp.where(advantages < 0, jnp.maximum(objective, dual_clip * advantages), objective)


def clip_fractions(
    log_ratio: jax.Array, advantages: jax.Array, *, clip_low: float, clip_high: float
) -> tuple[jax.Array, jax.Array]:
    """Where the clip of `clipped_surrogate` holds; its means are the clip fractions.

        ratio < 1 - clip_low and A < 0;  ratio > 1 + clip_high and A > 0

    Args:
      log_ratio: any shape, in nats.
      advantages: the same shape.
      clip_low: width below 1.
      clip_high: width above 1.

    Returns:
      Two boolean arrays of the same shape, low and high.
    """
    ratio = importance_ratio(log_ratio)
    return (ratio < 1.0 - clip_low) & (advantages < 0), (ratio > 1.0 + clip_high) & (advantages > 0)


def policy_gradient_surrogate(
    log_ratio: jax.Array, advantages: jax.Array, *, log_prob: jax.Array | None = None
) -> jax.Array:
    """The plain policy gradient, for data of the current policy.

        A log pi

    REINFORCE; with group-relative advantages GPG (https://arxiv.org/abs/2504.02546).

    Args:
      log_ratio: any shape, in nats. It differs from `log_prob` by a constant, so the gradient is the same.
      advantages: the same shape.
      log_prob: the value to weigh, for the published value of the loss; the log-ratio without it.

    Returns:
      The same shape.
    """
    return jax.lax.stop_gradient(at_least_float32(advantages)) * _with_value(log_ratio, log_prob)


def cispo_surrogate(
    log_ratio: jax.Array,
    advantages: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    log_prob: jax.Array | None = None,
) -> jax.Array:
    """The policy gradient weighted by the clipped ratio: clipping bounds a step's weight but never drops its gradient.

        sg(clip(ratio, 1 - clip_low, 1 + clip_high)) A log pi

    CISPO, MiniMax-M1 (https://arxiv.org/abs/2506.13585).

    Args:
      log_ratio: any shape, in nats.
      advantages: the same shape.
      clip_low: width below 1 (the paper: 1, that is, no lower bound).
      clip_high: width above 1.
      log_prob: as in `policy_gradient_surrogate`.

    Returns:
      The same shape.
    """
    weight = jnp.clip(importance_ratio(jax.lax.stop_gradient(log_ratio)), 1.0 - clip_low, 1.0 + clip_high)
    return weight * policy_gradient_surrogate(log_ratio, advantages, log_prob=log_prob)


def sapo_surrogate(
    log_ratio: jax.Array, advantages: jax.Array, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> jax.Array:
    """A soft gate in place of the clip.

        4/tau sigmoid(tau (ratio - 1)) A,  tau = tau_positive if A > 0 else tau_negative

    SAPO (https://arxiv.org/abs/2511.20347). The gradient fades with the distance of the ratio from 1, on both sides.

    Args:
      log_ratio: any shape, in nats.
      advantages: the same shape.
      tau_positive: temperature for positive advantages; larger fades sooner.
      tau_negative: temperature for the others.

    Returns:
      The same shape.
    """
    advantages = jax.lax.stop_gradient(at_least_float32(advantages))
    tau = jnp.where(advantages > 0, tau_positive, tau_negative)
    return 4.0 / tau * jax.nn.sigmoid(tau * (importance_ratio(log_ratio) - 1.0)) * advantages


def truncated_importance_weights(
    behaviour_log_prob: jax.Array, rollout_log_prob: jax.Array, *, limit: float
) -> jax.Array:
    """Weights that correct for samples from another policy than the behaviour policy that the loss believes in.

        min(exp(behaviour_log_prob - rollout_log_prob), limit)

    For a sampler that is stale, or that rounds differently; they multiply a surrogate. Truncation as in IMPALA
    (https://arxiv.org/abs/1802.01561).

    Args:
      behaviour_log_prob: any shape, under the policy that the ratio is taken to.
      rollout_log_prob: the same shape, under the policy that chose the actions.
      limit: of the weights, > 0 (2 is common).

    Returns:
      The same shape, in (0, limit], without gradient.
    """
    log_ratio = at_least_float32(behaviour_log_prob) - at_least_float32(rollout_log_prob)
    return jax.lax.stop_gradient(jnp.minimum(importance_ratio(log_ratio), limit))


def covariance_clip(
    log_prob: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    key: jax.Array,
    *,
    fraction: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    excluded: jax.Array | None = None,
) -> jax.Array:
    """Steps whose objective is to be dropped, drawn from those that drive the entropy down.

        cov_t = (A_t - mean(A)) (log pi_t - mean(log pi));  at random, of the steps with low < cov_t < high

    Clip-Cov (https://arxiv.org/abs/2505.22617).

    Args:
      log_prob: `[T, N]`, of the policy, in nats.
      advantages: `[T, N]`.
      mask: `[T, N]`, true on the valid steps, which means and number are taken over.
      key: of the draw.
      fraction: of the valid steps that are selected, rounded down, at least one.
      low: covariance above which a step may be drawn.
      high: covariance below which a step may be drawn.
      excluded: `[T, N]`, true on steps that are not to be drawn: the paper excludes those that PPO clips already.

    Returns:
      `[T, N]`, boolean; all false where no step qualifies.
    """
    covariance = _covariance(log_prob, advantages, mask)
    eligible = mask.astype(bool) & (covariance > low) & (covariance < high)
    if excluded is not None:
        eligible &= ~excluded.astype(bool)
    return _first(jax.random.uniform(key, mask.shape), eligible, _share(mask, fraction))


def covariance_kl(log_prob: jax.Array, advantages: jax.Array, mask: jax.Array, *, fraction: float = 2e-4) -> jax.Array:
    """Steps to be penalised with a KL to the behaviour policy: those that drive the entropy down the most.

        the fraction * (valid steps) with the largest (A_t - mean(A)) (log pi_t - mean(log pi))

    KL-Cov (https://arxiv.org/abs/2505.22617): on them the objective is `ratio A - coef |log_ratio|`
    (`divergences.abs_k1`).

    Args:
      log_prob: `[T, N]`, of the policy, in nats.
      advantages: `[T, N]`.
      mask: `[T, N]`, true on the valid steps.
      fraction: of the valid steps that are selected, rounded down, at least one.

    Returns:
      `[T, N]`, boolean; all false where no step is valid.
    """
    return _first(-_covariance(log_prob, advantages, mask), mask.astype(bool), _share(mask, fraction))


def _with_value(log_ratio: jax.Array, log_prob: jax.Array | None) -> jax.Array:
    """The gradient of the log-ratio with the value of the log-probability."""
    log_ratio = at_least_float32(log_ratio)
    return log_ratio if log_prob is None else log_ratio + jax.lax.stop_gradient(log_prob - log_ratio)


def _covariance(log_prob: jax.Array, advantages: jax.Array, mask: jax.Array) -> jax.Array:
    chex.assert_equal_shape([log_prob, advantages, mask])
    valid = mask.astype(bool)
    count = jnp.maximum(jnp.sum(valid), 1)

    def deviation(x: jax.Array) -> jax.Array:
        x = jnp.where(valid, jax.lax.stop_gradient(at_least_float32(x)), 0.0)
        return x - jnp.sum(x) / count

    return deviation(advantages) * deviation(log_prob)


def _share(mask: jax.Array, fraction: float) -> jax.Array:
    """How many steps are that fraction of the valid ones: a traced number, at least 1."""
    return jnp.maximum(jnp.floor(fraction * jnp.sum(mask.astype(bool))), 1)


def _first(order: jax.Array, eligible: jax.Array, number: jax.Array) -> jax.Array:
    """The first `number` of the eligible entries in ascending order."""
    ranks = jnp.argsort(jnp.argsort(jnp.where(eligible, order, jnp.inf), axis=None))
    return eligible & (ranks.reshape(order.shape) < number)

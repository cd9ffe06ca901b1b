"""Losses: masked reductions, value loss, entropy, and GRPO's and PPO's losses whole, on plain arrays.

Ratios and surrogates live in `surrogates` and are names of this module too.

A reduction maps a mask `[T, N]` to weights `[T, N]`, so that `loss = sum(weights * x)`. Weights know the whole
minibatch: computed once and split along with it, they make the accumulated gradient of its parts equal the gradient of
the whole, under every reduction.

Numbers may be of any type; half precision, integers and booleans are computed with as `precision` says.
"""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from grpo_jax.objectives.divergences import k3
from grpo_jax.objectives.surrogates import (
    cispo_surrogate,
    clip_fractions,
    clipped_surrogate,
    covariance_clip,
    covariance_kl,
    geometric_mean,
    importance_ratio,
    policy_gradient_surrogate,
    sapo_surrogate,
    sequence_log_ratio,
    sequence_token_log_ratio,
    truncated_importance_weights,
)
from grpo_jax.precision import at_least_float32

__all__ = [
    "cispo_surrogate",
    "clip_fractions",
    "clipped_surrogate",
    "clipped_value_loss",
    "covariance_clip",
    "covariance_kl",
    "explained_variance",
    "geometric_mean",
    "grpo_loss",
    "importance_ratio",
    "mean_of_sequence_means",
    "mean_of_sequence_sums",
    "mean_over_steps",
    "policy_gradient_surrogate",
    "ppo_loss",
    "sapo_surrogate",
    "sequence_log_ratio",
    "sequence_token_log_ratio",
    "sum_over_horizon",
    "top_entropy_mask",
    "truncated_importance_weights",
    "value_loss",
    "weighted_sum",
]


def mean_over_steps(mask: jax.Array) -> jax.Array:
    """Weights of the mean over all valid steps of the batch: every step counts the same.

        w_it = m_it / sum(m)

    DAPO (https://arxiv.org/abs/2503.14476).

    Args:
      mask: `[T, N]`, true on the valid steps.

    Returns:
      `[T, N]`; all 0 if no step is valid.
    """
    steps = mask.astype(float)
    return steps / jnp.maximum(jnp.sum(steps), 1.0)


def mean_of_sequence_means(mask: jax.Array) -> jax.Array:
    """Weights of the mean over sequences of their means: every sequence counts the same, a step of a short one more.

        w_it = m_it / (|y_i| * number of sequences)

    GRPO (https://arxiv.org/abs/2402.03300). Where length is reward it favours what ends early: see Dr. GRPO
    (https://arxiv.org/abs/2503.20783).

    Args:
      mask: `[T, N]`, true on the valid steps.

    Returns:
      `[T, N]`; all 0 if no step is valid. Sequences without a valid step are not counted.
    """
    steps = mask.astype(float)
    return mean_of_sequence_sums(mask) / jnp.maximum(jnp.sum(steps, axis=0, keepdims=True), 1.0)


def mean_of_sequence_sums(mask: jax.Array) -> jax.Array:
    """Weights of the mean over sequences of their sums: the policy gradient of the episode.

        w_it = m_it / number of sequences

    Args:
      mask: `[T, N]`, true on the valid steps.

    Returns:
      `[T, N]`; all 0 if no step is valid. Sequences without a valid step are not counted.
    """
    steps = mask.astype(float)
    return steps / jnp.maximum(jnp.sum(jnp.max(steps, axis=0)), 1.0)


def sum_over_horizon(mask: jax.Array, *, horizon: float | None = None) -> jax.Array:
    """Weights of the sum over steps divided by a constant: no weight depends on any length.

        w_it = m_it / (N horizon)

    Dr. GRPO (https://arxiv.org/abs/2503.20783).

    Args:
      mask: `[T, N]`, true on the valid steps.
      horizon: in steps; `T` without it.

    Returns:
      `[T, N]`; all 0 if no step is valid. Sequences without a valid step are counted.
    """
    num_steps, num_rollouts = mask.shape
    return mask.astype(float) / (num_rollouts * (num_steps if horizon is None else horizon))


def weighted_sum(values: jax.Array, weights: jax.Array) -> jax.Array:
    """The sum of weighted values, which ignores values of weight 0, even those that are not finite.

    The gradient into an ignored value is exactly 0. If that value came from a NaN, the chain rule beyond it may still
    give NaN: replace masked *inputs*, as `grpo_loss` does.

    Args:
      values: any shape.
      weights: the same shape, without gradient.

    Returns:
      Scalar.
    """
    chex.assert_equal_shape([values, weights])
    values, weights = at_least_float32(values), at_least_float32(weights)
    return jnp.sum(weights * jnp.where(weights == 0, 0.0, values))


def value_loss(values: jax.Array, targets: jax.Array) -> jax.Array:
    """Half the squared error.

        (V - target)^2 / 2

    Args:
      values: any shape.
      targets: the same shape; constants.

    Returns:
      The same shape.
    """
    return 0.5 * jnp.square(at_least_float32(values) - jax.lax.stop_gradient(at_least_float32(targets)))


def clipped_value_loss(values: jax.Array, behaviour_values: jax.Array, targets: jax.Array, *, clip: float) -> jax.Array:
    """The larger of the squared errors of the value and of the value clipped around its old one.

        max((V - target)^2, (V_old + clip(V - V_old, -clip, clip) - target)^2) / 2

    PPO's reference implementation.

    Args:
      values: any shape.
      behaviour_values: the same shape, as predicted during the rollout; constants.
      targets: the same shape; constants.
      clip: width, in the units of the values.

    Returns:
      The same shape; its gradient is exactly 0 where the clipped error is the larger.
    """
    values, behaviour_values = at_least_float32(values), jax.lax.stop_gradient(at_least_float32(behaviour_values))
    near = behaviour_values + jnp.clip(values - behaviour_values, -clip, clip)
    return jnp.maximum(value_loss(values, targets), value_loss(near, targets))


def top_entropy_mask(entropy: jax.Array, mask: jax.Array, *, quantile: float) -> jax.Array:
    """The valid steps whose entropy is in the top of the batch.

        m_it and H_it >= quantile(H over valid steps)

    https://arxiv.org/abs/2506.01939 (quantile 0.8: the 20% of the steps at which the policy decides something). Reduce
    with it in place of the mask.

    Args:
      entropy: `[T, N]`, in nats.
      mask: `[T, N]`, true on the valid steps.
      quantile: in [0, 1]; 0 keeps every valid step, 1 the largest alone.

    Returns:
      `[T, N]`, boolean; all false if no step is valid.
    """
    valid = mask.astype(bool)
    entropy = at_least_float32(entropy)
    ascending = jnp.sort(jnp.where(valid, entropy, jnp.inf), axis=None)
    index = jnp.ceil(quantile * (jnp.sum(valid) - 1)).astype(int)
    return valid & (entropy >= ascending[jnp.clip(index, 0, entropy.size - 1)])


def grpo_loss(
    log_prob: jax.Array,
    behaviour_log_prob: jax.Array,
    advantages: jax.Array,
    mask: jax.Array | None = None,
    *,
    reference_log_prob: jax.Array | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    reduce: Callable[[jax.Array], jax.Array] = mean_over_steps,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """GRPO's loss on plain arrays: the clipped surrogate and a k3 penalty to a reference policy.

        -reduce(clipped_surrogate(log_ratio, A)) + kl_coef reduce(k3(log_prob, reference_log_prob))

    https://arxiv.org/abs/2402.03300.

    Args:
      log_prob: `[T, N]`, of the actions under the policy: the only argument that gets a gradient.
      behaviour_log_prob: `[T, N]`, under the parameters that took them.
      advantages: `[T, N]`.
      mask: `[T, N]`, true on the valid steps; all of them without it.
      reference_log_prob: `[T, N]`, under the reference policy; no penalty without it.
      clip_low: width of the clip below 1.
      clip_high: width of the clip above 1.
      kl_coef: weight of the penalty.
      reduce: mask to weights; what makes it GRPO, Dr. GRPO or DAPO.

    Returns:
      The loss, a scalar, and a dictionary of scalar metrics. With no valid step the loss and its gradient are 0.
    """
    mask = jnp.ones(log_prob.shape, bool) if mask is None else mask.astype(bool)
    chex.assert_equal_shape([log_prob, behaviour_log_prob, advantages, mask])
    if reference_log_prob is not None:
        chex.assert_equal_shape([log_prob, reference_log_prob])
    elif not (isinstance(kl_coef, int | float) and kl_coef == 0):
        raise ValueError("kl_coef weighs the KL to a reference policy: pass reference_log_prob too, or leave it at 0")
    # Masked inputs are replaced rather than multiplied by 0: what stands there may not be finite.
    log_prob, behaviour_log_prob, advantages = (
        jnp.where(mask, at_least_float32(x), 0.0) for x in (log_prob, behaviour_log_prob, advantages)
    )
    behaviour_log_prob, advantages = jax.lax.stop_gradient((behaviour_log_prob, advantages))
    log_ratio = log_prob - behaviour_log_prob
    weights = reduce(mask)

    objective = clipped_surrogate(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    loss = policy_loss = -weighted_sum(objective, weights)

    def mean(x: jax.Array) -> jax.Array:
        return weighted_sum(jax.lax.stop_gradient(x).astype(float), mean_over_steps(mask))

    low, high = clip_fractions(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    metrics = {
        "loss/policy": policy_loss,
        # The actions are the behaviour policy's, so this is KL(behaviour || policy).
        "policy/kl_behaviour": mean(k3(behaviour_log_prob, log_prob)),
        "policy/clip_fraction_low": mean(low),
        "policy/clip_fraction_high": mean(high),
        "policy/ratio_max": jnp.max(importance_ratio(log_ratio), where=mask, initial=0.0),
        "advantage/abs_mean": mean(jnp.abs(advantages)),
    }
    if reference_log_prob is not None:
        penalty = k3(log_prob, jnp.where(mask, at_least_float32(reference_log_prob), 0.0))
        loss = loss + kl_coef * weighted_sum(penalty, weights)
        metrics["policy/kl_reference"] = mean(penalty)
    return loss, jax.lax.stop_gradient(metrics)


def ppo_loss(
    log_prob: jax.Array,
    behaviour_log_prob: jax.Array,
    advantages: jax.Array,
    values: jax.Array,
    behaviour_values: jax.Array,
    targets: jax.Array,
    entropy: jax.Array,
    mask: jax.Array | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    value_clip: float | None = 0.2,
    value_coef: float = 0.5,
    entropy_coef: float = 0.01,
    reduce: Callable[[jax.Array], jax.Array] = mean_over_steps,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """PPO's loss on plain arrays: the clipped surrogate, the value loss and the entropy bonus.

        -reduce(clipped_surrogate(log_ratio, A)) + value_coef reduce(value loss) - entropy_coef reduce(entropy)

    https://arxiv.org/abs/1707.06347. Normalise the advantages before, if at all (`advantages.whiten`).

    Args:
      log_prob: `[T, N]`, of the actions under the policy.
      behaviour_log_prob: `[T, N]`, under the parameters that took them.
      advantages: `[T, N]`.
      values: `[T, N]`, as predicted now.
      behaviour_values: `[T, N]`, as predicted during the rollout.
      targets: `[T, N]`, what the values should be: advantages (not normalised) plus `behaviour_values`.
      entropy: `[T, N]`, of the policy, in nats.
      mask: `[T, N]`, true on the valid steps; all of them without it.
      clip_low: width of the clip below 1.
      clip_high: width of the clip above 1.
      value_clip: width of the clip of the values, in their units; `None` for the plain squared error.
      value_coef: weight of the value loss.
      entropy_coef: weight of the entropy bonus.
      reduce: mask to weights.

    Returns:
      The loss, a scalar, and a dictionary of scalar metrics. With no valid step the loss and its gradient are 0.
    """
    mask = jnp.ones(log_prob.shape, bool) if mask is None else mask.astype(bool)
    chex.assert_equal_shape([log_prob, values, behaviour_values, targets, entropy, mask])
    policy_loss, metrics = grpo_loss(
        log_prob, behaviour_log_prob, advantages, mask, clip_low=clip_low, clip_high=clip_high, reduce=reduce
    )
    values, behaviour_values, targets, entropy = (
        jnp.where(mask, at_least_float32(x), 0.0) for x in (values, behaviour_values, targets, entropy)
    )
    if value_clip is None:
        errors = value_loss(values, targets)
    else:
        errors = clipped_value_loss(values, behaviour_values, targets, clip=value_clip)
    weights = reduce(mask)
    critic_loss, bonus = weighted_sum(errors, weights), weighted_sum(entropy, weights)
    metrics |= {
        "loss/value": critic_loss,
        "policy/entropy": weighted_sum(entropy, mean_over_steps(mask)),
        "value/explained_variance": explained_variance(behaviour_values, targets, mask),
    }
    return policy_loss + value_coef * critic_loss - entropy_coef * bonus, jax.lax.stop_gradient(metrics)


def explained_variance(values: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
    """How much of the targets' variance the values predict.

        1 - var(targets - values) / var(targets)

    Args:
      values: `[T, N]`, of the critic, in the units of the returns.
      targets: `[T, N]`, what they should be, in the same units.
      mask: `[T, N]`, 1 or True on valid steps; others, NaN included, are ignored.

    Returns:
      Scalar: 1 for perfect values, 0 for constant ones, below 0 for worse; 0 where the targets do not vary.
    """

    mask = mask.astype(bool)
    values, targets = at_least_float32(values), at_least_float32(targets)
    weights = mean_over_steps(mask)

    def variance(x: jax.Array) -> jax.Array:
        x = x - jnp.max(x, where=mask, initial=-jnp.inf)  # or the mean of equal numbers is off by a rounding error
        return weighted_sum(jnp.square(x - weighted_sum(x, weights)), weights)

    total = variance(targets)
    return jnp.where(total > 0, 1.0 - variance(targets - values) / jnp.where(total > 0, total, 1.0), 0.0)

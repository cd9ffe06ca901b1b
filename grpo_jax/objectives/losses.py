"""GRPO's and PPO's losses whole, on plain arrays, and the value loss."""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from grpo_jax.objectives.divergences import k3
from grpo_jax.objectives.ratios import importance_ratio
from grpo_jax.objectives.reductions import mean_over_steps, weighted_sum
from grpo_jax.objectives.surrogates import clip_fractions, clipped_surrogate
from grpo_jax.precision import at_least_float32

__all__ = ["explained_variance", "grpo_loss", "ppo_loss", "value_loss"]


def value_loss(
    values: jax.Array, targets: jax.Array, behaviour_values: jax.Array | None = None, *, clip: float | None = None
) -> jax.Array:
    """Half the squared error of values; with a clip, at least the error of values clipped around the old ones.

        (V - target)^2 / 2
        and, with `clip`, at least (V_old + clip(V - V_old, -clip, clip) - target)^2 / 2

    The clip is of PPO's reference implementation.

    Args:
      values: any shape.
      targets: the same shape; constants.
      behaviour_values: the same shape, as predicted during the rollout; constants, read only with a clip.
      clip: width, in the units of the values; None for the plain error.

    Returns:
      The same shape; its gradient is exactly 0 where the clipped error is the larger.

    Raises:
      ValueError: a clip without the values to clip around.
    """
    values, targets = at_least_float32(values), jax.lax.stop_gradient(at_least_float32(targets))
    error = 0.5 * jnp.square(values - targets)
    if clip is None:
        return error
    if behaviour_values is None:
        raise ValueError("clip limits how far values move from the rollout's: pass behaviour_values too")
    behaviour_values = jax.lax.stop_gradient(at_least_float32(behaviour_values))
    near = behaviour_values + jnp.clip(values - behaviour_values, -clip, clip)
    return jnp.maximum(error, 0.5 * jnp.square(near - targets))


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
      clip_low, clip_high: widths of the clip below and above 1.
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

    https://arxiv.org/abs/1707.06347. Normalise the advantages before, if at all (`whiten`).

    Args:
      log_prob: `[T, N]`, of the actions under the policy.
      behaviour_log_prob: `[T, N]`, under the parameters that took them.
      advantages: `[T, N]`.
      values: `[T, N]`, as predicted now.
      behaviour_values: `[T, N]`, as predicted during the rollout.
      targets: `[T, N]`, what the values should be: advantages (not normalised) plus `behaviour_values`.
      entropy: `[T, N]`, of the policy, in nats.
      mask: `[T, N]`, true on the valid steps; all of them without it.
      clip_low, clip_high: widths of the clip below and above 1.
      value_clip: width of the clip of the values, in their units; `None` for the plain squared error.
      value_coef, entropy_coef: weights of the value loss and of the entropy bonus.
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
    errors = value_loss(values, targets, behaviour_values, clip=value_clip)
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
      mask: `[T, N]`, true on the valid steps; the others, NaN included, are ignored.

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

"""Surrogates: the objective that the next update increases.

A surrogate is `surrogate(log_ratio, advantages, *, ...)`, to be *maximised*: elementwise, for arrays of any one shape,
in the units of the advantages; reductions (`mean_over_steps`, ...) make the loss. Gradients flow through the log-ratio,
`log_prob - behaviour_log_prob` in nats; advantages are constants. `clip_low`, in [0, 1], and `clip_high`, >= 0, are the
widths of a clip of the ratio below and above 1. The functions of `ratios` change the unit over which ratios are taken
(a step, a sequence) and compose with every surrogate:

    clipped_surrogate(sequence_log_ratio(log_ratio, mask), advantages, clip_low=3e-4, clip_high=4e-4)     # GSPO

At ratio 1 every surrogate has the gradient of the plain policy gradient, `advantage * d log_prob`. The exception is
`target_policy_surrogate`, of whole groups.
"""

import jax
import jax.numpy as jnp

from grpo_jax.hyperparams import POSITIVE, Hyperparams, at_least_1, number
from grpo_jax.objectives.ratios import importance_ratio
from grpo_jax.precision import above_rounding, at_least_float32

__all__ = ["DualClipHyperparams", "SapoHyperparams", "cispo_surrogate", "clip_fractions", "clipped_surrogate"]
__all__ += ["TpoHyperparams", "policy_gradient_surrogate", "sapo_surrogate", "target_policy_surrogate"]
__all__ += ["unclipped_surrogate"]


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
    dual clip bounds what a large ratio does with a negative advantage (https://arxiv.org/abs/1912.09729; as two-sided
    clipping in INTELLECT-2, https://arxiv.org/abs/2505.07291).

    The gradient is exactly 0 where a clip holds. `dual_clip` is the largest ratio that counts where the advantage is
    negative, > 1 + clip_high (3 is common); `None` leaves it unbounded.
    """
    advantages = jax.lax.stop_gradient(at_least_float32(advantages))
    ratio = importance_ratio(log_ratio)
    objective = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages)
    if dual_clip is None:
        return objective
    return jnp.where(advantages < 0, jnp.maximum(objective, dual_clip * advantages), objective)


class DualClipHyperparams(Hyperparams):
    """With the number of `with_hyperparams(clipped_surrogate, "clip_low", "clip_high", "dual_clip")`."""

    dual_clip: float = number(
        3.0, at_least_1("would bound the surrogate where the policy has not changed; use more than 1 + clip_high")
    )
    """Bound of a dual-clipped surrogate, in units of a negative advantage."""


def clip_fractions(
    log_ratio: jax.Array, advantages: jax.Array, *, clip_low: float, clip_high: float
) -> tuple[jax.Array, jax.Array]:
    """Where `clipped_surrogate` clips below and above, two boolean arrays; their means are the clip fractions.

    ratio < 1 - clip_low and A < 0;  ratio > 1 + clip_high and A > 0
    """
    ratio = importance_ratio(log_ratio)
    return (ratio < 1.0 - clip_low) & (advantages < 0), (ratio > 1.0 + clip_high) & (advantages > 0)


def unclipped_surrogate(log_ratio: jax.Array, advantages: jax.Array) -> jax.Array:
    """The plain objective of importance sampling, `ratio A`."""
    return importance_ratio(log_ratio) * jax.lax.stop_gradient(at_least_float32(advantages))


def policy_gradient_surrogate(log_ratio: jax.Array, advantages: jax.Array) -> jax.Array:
    """The plain policy gradient, for data of the current policy.

        A log pi

    REINFORCE; with group-relative advantages GPG (https://arxiv.org/abs/2504.02546). The log-ratio differs from log pi
    by a constant, so the gradient is the same.
    """
    return jax.lax.stop_gradient(at_least_float32(advantages)) * at_least_float32(log_ratio)


def cispo_surrogate(log_ratio: jax.Array, advantages: jax.Array, *, clip_low: float, clip_high: float) -> jax.Array:
    """The policy gradient weighted by the clipped ratio: clipping bounds a step's weight but never drops its gradient.

        sg(clip(ratio, 1 - clip_low, 1 + clip_high)) A log pi

    CISPO, MiniMax-M1 (https://arxiv.org/abs/2506.13585; there clip_low is 1, that is, no lower bound).
    """
    weight = jnp.clip(importance_ratio(jax.lax.stop_gradient(log_ratio)), 1.0 - clip_low, 1.0 + clip_high)
    return weight * policy_gradient_surrogate(log_ratio, advantages)


def sapo_surrogate(
    log_ratio: jax.Array, advantages: jax.Array, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> jax.Array:
    """A soft gate instead of the clip.

        4/tau sigmoid(tau (ratio - 1)) A,  tau = tau_positive if A > 0 else tau_negative

    SAPO (https://arxiv.org/abs/2511.20347). The gradient fades with the distance of the ratio from 1, on both sides,
    and sooner with a larger temperature tau.
    """
    advantages = jax.lax.stop_gradient(at_least_float32(advantages))
    tau = jnp.where(advantages > 0, tau_positive, tau_negative)
    return 4.0 / tau * jax.nn.sigmoid(tau * (importance_ratio(log_ratio) - 1.0)) * advantages


class SapoHyperparams(Hyperparams):
    """With the numbers of `sapo_surrogate`."""

    sapo_tau_positive: float = number(1.0, POSITIVE)
    """Temperature of SAPO's sigmoid where the advantage is positive."""
    sapo_tau_negative: float = number(1.05, POSITIVE)
    """Temperature of SAPO's sigmoid where the advantage is negative."""


def target_policy_surrogate(
    log_prob: jax.Array,
    behaviour_log_prob: jax.Array,
    advantages: jax.Array,
    valid: jax.Array | None = None,
    *,
    temperature: float = 1.0,
) -> jax.Array:
    """Minus the cross-entropy between a target and the policy, both over the members of a group.

        sum_i q_i log p_i,  p = softmax(log pi),  q = softmax(log pi_behaviour + A / temperature), a constant

    TPO (https://arxiv.org/abs/2604.06159). The gradient by log pi_i is q_i - p_i, exactly 0 at the target, so that many
    epochs of the same samples are safe. A group with equal advantages is pulled back to the behaviour policy.

    Args:
      log_prob: `[..., K]`, of each member: the sum over its steps, in nats.
      behaviour_log_prob: `[..., K]`, under the parameters that played; constants.
      advantages: `[..., K]`, constants; the paper's are `group_normalized`.
      valid: `[..., K]` bool: the members that count, all by default.
      temperature: above 0, in units of the advantages; near 0 the target is the best member alone.

    Returns:
      `[...]`; 0 where no member is valid.
    """
    valid = jnp.ones(log_prob.shape, bool) if valid is None else valid.astype(bool)
    log_prob, behaviour, advantages = map(at_least_float32, (log_prob, behaviour_log_prob, advantages))
    # Less the best, so that no quotient overflows upwards.
    excess = (advantages - jnp.max(advantages, -1, keepdims=True, where=valid, initial=-jnp.inf)) / temperature
    unmoved = above_rounding(log_prob - behaviour, log_prob, behaviour) == 0
    logits = jnp.stack([behaviour + excess, jnp.where(unmoved, behaviour, log_prob)])
    nowhere = jnp.finfo(log_prob.dtype).min / 2  # finite: with -inf a group without a valid member would be NaN
    logits = jax.lax.stop_gradient(jnp.where(valid, logits, nowhere))
    target, policy = jax.nn.softmax(logits)
    value = jnp.sum(target * jnp.where(valid & (target > 0), jax.nn.log_softmax(logits)[1], 0.0), axis=-1)
    # The slope as a difference of two like numbers is exactly 0 where they are equal; Adam would enlarge its rounding.
    slope = target - policy
    return value + jnp.sum(slope * (log_prob - jax.lax.stop_gradient(log_prob)), axis=-1, where=valid)


class TpoHyperparams(Hyperparams):
    """With the number of `target_policy_surrogate`."""

    tpo_temperature: float = number(1.0, POSITIVE)
    """Temperature of TPO's target: lower follows the best members of a group more."""

"""Kullback-Leibler divergences between the policy and a reference: estimates, exact values, coefficients.

`k1`, `k2` and `k3` estimate KL(policy || reference), in nats, from log-probabilities of sampled actions: log p under
the policy and log q under the reference (http://joschu.net/blog/kl-approx.html). They are elementwise, for arrays of
any one shape. Log-ratios are clamped to +-20, so that no estimate overflows, and no gradient flows into the reference.
All but `k1` and `k2_straight_through` are at least 0. A log-ratio that rounding alone may have made
(`precision.above_rounding`) counts as 0, in value and slope: a policy that has not moved pays no penalty.

A trap: as a *loss*, `k1` does not pull towards the reference. On-policy its gradient has mean 0 (the mean score),
for every reference. `k2` and `k2_straight_through` have the gradient of the KL, and `k3` has the gradient of
KL(reference || policy). `k1` belongs in the reward (`kl_penalized_reward`).
"""

import jax
import jax.numpy as jnp

from grpo_jax.precision import above_rounding, at_least_float32

__all__ = ["exact", "k1", "k2", "k2_straight_through", "k3", "k3_from_behaviour"]

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: far outside any trust region, far inside float32


def log_ratio_above_rounding(log_prob: jax.Array, other: jax.Array) -> jax.Array:
    """log p - log q, without gradient into log q; 0, with slope 0, where rounding alone may have made it."""
    difference = at_least_float32(log_prob) - jax.lax.stop_gradient(at_least_float32(other))
    return above_rounding(difference, jnp.asarray(log_prob), jnp.asarray(other), least=1.0)  # log-sum-exp adds near 1


def k1(log_prob: jax.Array, reference_log_prob: jax.Array) -> jax.Array:
    """The log-ratio itself: unbiased, of high variance, either sign.

        k1 = log p - log q

    As a loss it has no effect on-policy: see the head of this module.
    """
    return jnp.clip(log_ratio_above_rounding(log_prob, reference_log_prob), -MAX_LOG_RATIO, MAX_LOG_RATIO)


def k2(log_prob: jax.Array, reference_log_prob: jax.Array) -> jax.Array:
    """Half the squared log-ratio: biased, of low variance, and with the KL's own gradient on-policy.

    k2 = (log p - log q)^2 / 2
    """
    return 0.5 * jnp.square(k1(log_prob, reference_log_prob))


def k3(log_prob: jax.Array, reference_log_prob: jax.Array) -> jax.Array:
    """The log-ratio with a control variate: unbiased and never negative.

        k3 = q/p - 1 - log(q/p)

    GRPO's penalty (https://arxiv.org/abs/2402.03300).
    """
    log_ratio = k1(log_prob, reference_log_prob)
    return jnp.expm1(-log_ratio) + log_ratio  # exp(x) - 1 - x cancels near 0, where a penalty lives


def k3_from_behaviour(behaviour_log_prob: jax.Array, log_prob: jax.Array) -> jax.Array:
    """The estimate k3 of KL(behaviour || policy) from the actions of the behaviour policy.

        p/b - 1 - log(p/b)

    Both its value and its gradient, which flows into `log_prob`, are unbiased.
    """
    log_ratio = k1(log_prob, behaviour_log_prob)
    return jnp.expm1(log_ratio) - log_ratio


def k2_straight_through(log_prob: jax.Array, reference_log_prob: jax.Array) -> jax.Array:
    """The value of k1, which is unbiased, with the gradient of k2, which points the right way."""
    value, slope = k1(log_prob, reference_log_prob), k2(log_prob, reference_log_prob)
    return slope + jax.lax.stop_gradient(value - slope)


def exact(log_probs: jax.Array, reference_log_probs: jax.Array) -> jax.Array:
    """Exact KL(policy || reference) of categorical distributions.

        sum_a p(a) (log p(a) - log q(a))

    Unlike in the estimates, the gradient flows into both arguments.

    Args:
      log_probs: `[..., num_actions]`, normalised log-probabilities of the policy; -inf where an action is masked.
      reference_log_probs: `[..., num_actions]`, of the reference.

    Returns:
      `[...]`, in nats, >= 0 up to rounding; 0, with slope 0, if all log-probabilities are equal up to rounding. Actions
      that the policy cannot take add 0, and their gradient is 0; inf if the policy takes an action that the reference
      cannot.
    """
    log_probs, reference_log_probs = at_least_float32(log_probs), at_least_float32(reference_log_probs)
    possible = jnp.exp(log_probs) > 0  # also where a probability underflows
    # Both operands are replaced before they meet: 0 * (-inf - -inf) is NaN, and so is its gradient.
    log_p, log_q = jnp.where(possible, log_probs, 0.0), jnp.where(possible, reference_log_probs, 0.0)
    differs = jnp.any(above_rounding(log_p - log_q, log_p, log_q, least=1.0) != 0, axis=-1)
    return jnp.where(differs, jnp.sum(jnp.where(possible, jnp.exp(log_p) * (log_p - log_q), 0.0), axis=-1), 0.0)

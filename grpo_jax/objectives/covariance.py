"""Clip-Cov and KL-Cov (https://arxiv.org/abs/2505.22617): restrain the steps that drive the entropy down."""

import chex
import jax
import jax.numpy as jnp

from grpo_jax.hyperparams import SHARE, Hyperparams, number
from grpo_jax.objectives.divergences import abs_k1
from grpo_jax.objectives.ratios import check_together
from grpo_jax.objectives.surrogates import clip_fractions
from grpo_jax.objectives.whitening import centred
from grpo_jax.types import Batch, Prediction

__all__ = ["CovarianceHyperparams", "covariance_clipped_ratio", "covariance_kl", "most_covariant_steps"]
__all__ += ["random_covariant_steps"]


class CovarianceHyperparams(Hyperparams):
    """With the numbers of Clip-Cov and KL-Cov."""

    covariance_fraction: float = number(0.002, SHARE)
    """Share of the steps that Clip-Cov and KL-Cov select."""
    covariance_kl_coef: float = number(1.0)
    """Weight of KL-Cov's penalty on the steps it selects."""


def random_covariant_steps(
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
    """Steps whose gradient Clip-Cov drops: a random selection of those that drive the entropy down.

        cov_t = (A_t - mean(A)) (log pi_t - mean(log pi));  at random, of the steps with low < cov_t < high

    Args:
      log_prob: `[T, N]`, of the policy, in nats.
      advantages: `[T, N]`.
      mask: `[T, N]`, true on the valid steps; means are over these.
      key: of the draw.
      fraction: of the valid steps that are selected, rounded down, at least one.
      low, high: covariances between which a step may be drawn.
      excluded: `[T, N]`, true on steps that are not to be drawn: the paper excludes those that PPO clips already.

    Returns:
      `[T, N]`, boolean; all false where no step qualifies.
    """
    covariance = _covariance(log_prob, advantages, mask)
    eligible = mask.astype(bool) & (covariance > low) & (covariance < high)
    if excluded is not None:
        eligible &= ~excluded.astype(bool)
    return _first(jax.random.uniform(key, mask.shape), eligible, mask, fraction)


def most_covariant_steps(
    log_prob: jax.Array, advantages: jax.Array, mask: jax.Array, *, fraction: float = 2e-4
) -> jax.Array:
    """Steps that KL-Cov penalises: those that drive the entropy down the most.

        the fraction * (valid steps) with the largest (A_t - mean(A)) (log pi_t - mean(log pi))

    On them the objective is `ratio A - coef |log_ratio|` (`abs_k1`). Arguments and result as in
    `random_covariant_steps`; none if all covariances are 0.
    """
    covariance = _covariance(log_prob, advantages, mask)
    return _first(-covariance, mask.astype(bool) & jnp.any(covariance != 0), mask, fraction)


def _covariance(log_prob: jax.Array, advantages: jax.Array, mask: jax.Array) -> jax.Array:
    chex.assert_equal_shape([log_prob, advantages, mask])
    advantages, log_prob = jax.lax.stop_gradient((advantages, log_prob))
    return centred(advantages, mask, axis=None) * centred(log_prob, mask, axis=None)


def _first(order: jax.Array, eligible: jax.Array, mask: jax.Array, fraction: float) -> jax.Array:
    """The first of the eligible entries in ascending order: as many as this fraction of the valid ones."""
    number = jnp.maximum(jnp.floor(fraction * jnp.sum(mask.astype(bool), dtype=float)), 1)
    ranks = jnp.argsort(jnp.argsort(jnp.where(eligible, order, jnp.inf), axis=None))
    return eligible & (ranks.reshape(order.shape).astype(float) < number)


def covariance_clipped_ratio(log_ratio: jax.Array, batch: Batch, hyperparams: CovarianceHyperparams) -> jax.Array:
    """Clip-Cov: each step has its own ratio, without gradient on `random_covariant_steps`."""
    check_together(batch, "whole_minibatches", "covariance_clipped_ratio")
    low, high = clip_fractions(
        log_ratio, batch.advantage, clip_low=hyperparams.clip_low, clip_high=hyperparams.clip_high
    )
    selected = random_covariant_steps(
        batch.log_prob + log_ratio,
        batch.advantage,
        batch.mask,
        jax.random.key(0),  # the samples of a minibatch come in random order already
        fraction=hyperparams.covariance_fraction,
        excluded=low | high,
    )
    return jnp.where(selected, jax.lax.stop_gradient(log_ratio), log_ratio)


def covariance_kl(prediction: Prediction, batch: Batch, hyperparams: CovarianceHyperparams) -> jax.Array:
    """KL-Cov: |log-ratio| to the behaviour policy, only on `most_covariant_steps`."""
    check_together(batch, "whole_minibatches", "covariance_kl")
    selected = most_covariant_steps(
        prediction.log_prob, batch.advantage, batch.mask, fraction=hyperparams.covariance_fraction
    )
    cost = hyperparams.covariance_kl_coef * abs_k1(prediction.log_prob, batch.log_prob)
    return jnp.where(selected, cost, 0.0)

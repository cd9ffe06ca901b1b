"""Masks of steps, for the slot `step_mask`: where it is false, the surrogate and its gradient are 0.

Log-probabilities are in nats and `[T, N]`, with a sequence along `T`. No gradient flows through a mask.
"""

import jax
import jax.numpy as jnp

from grpo_jax.hyperparams import Hyperparams
from grpo_jax.objectives.divergences import log_ratio_above_rounding
from grpo_jax.objectives.ratios import check_together
from grpo_jax.precision import at_least_float32
from grpo_jax.types import Batch, Prediction

__all__ = ["high_entropy", "keep_high_entropy", "keep_near_behaviour", "keep_on_policy_sequences"]
__all__ += ["near_behaviour", "on_policy_sequences"]


def near_behaviour(log_prob: jax.Array, behaviour_log_prob: jax.Array, *, limit: float) -> jax.Array:
    """Steps whose probability changed by at most `limit`, whatever the sign of the advantage: prime-rl's IPO.

    |p - b| <= limit
    """
    return jnp.abs(_change(log_prob, behaviour_log_prob)) <= limit


def _change(log_prob: jax.Array, behaviour_log_prob: jax.Array) -> jax.Array:
    """p - b; 0 where rounding alone may have made it."""
    change = jnp.exp(at_least_float32(log_prob)) - jnp.exp(at_least_float32(behaviour_log_prob))
    return jnp.where(log_ratio_above_rounding(log_prob, behaviour_log_prob) == 0, 0.0, change)


def high_entropy(entropy: jax.Array, mask: jax.Array, *, fraction: float = 0.2) -> jax.Array:
    """The valid steps of highest entropy: those at or above the `1 - fraction` quantile (interpolated).

    The 80/20 rule (https://arxiv.org/abs/2506.01939): few steps are forks, and learning from them is enough.
    """
    valid = mask.astype(bool)
    entropy = jax.lax.stop_gradient(at_least_float32(entropy))
    return valid & (entropy >= jnp.nanquantile(jnp.where(valid, entropy, jnp.nan), 1.0 - fraction))


def on_policy_sequences(
    log_prob: jax.Array, behaviour_log_prob: jax.Array, advantages: jax.Array, mask: jax.Array, *, limit: float
) -> jax.Array:
    """All steps but those of bad sequences that the policy has moved away from.

        A >= 0, or mean_t (log b - log p) <= limit

    DeepSeek-V3.2 (https://arxiv.org/abs/2512.02556).
    """
    valid = mask.astype(bool)
    away = -log_ratio_above_rounding(log_prob, behaviour_log_prob)
    away = jnp.sum(away, axis=0, keepdims=True, where=valid)
    return (advantages >= 0) | (away / jnp.maximum(jnp.sum(valid, axis=0, keepdims=True, dtype=float), 1) <= limit)


def keep_near_behaviour(prediction: Prediction, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """`near_behaviour`, within `clip_low` of the probability."""
    return near_behaviour(prediction.log_prob, batch.log_prob, limit=hyperparams.clip_low)


def keep_high_entropy(prediction: Prediction, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """`high_entropy`: a fifth of the minibatch."""
    check_together(batch, "whole_minibatches", "keep_high_entropy")
    return high_entropy(prediction.entropy, batch.mask)


def keep_on_policy_sequences(prediction: Prediction, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """`on_policy_sequences`, of limit `kl_target`."""
    check_together(batch, "whole_sequences", "keep_on_policy_sequences")
    return on_policy_sequences(
        prediction.log_prob, batch.log_prob, batch.advantage, batch.mask, limit=hyperparams.kl_target
    )

"""Probability ratios: of a step, of a sequence, and kept finite.

Log-ratios are in nats, and masks true on the valid steps; both are `[T, N]`, with a sequence along `T`.
"""

import jax
import jax.numpy as jnp

from grpo_jax.hyperparams import Hyperparams
from grpo_jax.objectives.divergences import MAX_LOG_RATIO
from grpo_jax.precision import at_least_float32
from grpo_jax.types import Batch

__all__ = ["importance_ratio", "sequence_log_ratio", "sequence_ratio", "sequence_token_log_ratio"]
__all__ += ["sequence_token_ratio", "step_ratio"]


def importance_ratio(log_ratio: jax.Array) -> jax.Array:
    """The likelihood ratio, kept finite, for any shape; its gradient is 0 beyond the clamp.

    exp(clip(log_ratio, -20, 20))
    """
    return jnp.exp(jnp.clip(at_least_float32(log_ratio), -MAX_LOG_RATIO, MAX_LOG_RATIO))


def sequence_log_ratio(log_ratio: jax.Array, mask: jax.Array) -> jax.Array:
    """The log of the geometric mean of a sequence's ratios, on each of its steps.

        s_i = 1/|y_i| sum_t log_ratio_it

    GSPO (https://arxiv.org/abs/2507.18071). The gradient of each step reaches all steps of its sequence. 0 for a
    sequence without a valid step.
    """
    valid = mask.astype(bool)
    total = jnp.sum(jnp.where(valid, at_least_float32(log_ratio), 0.0), axis=0, keepdims=True)
    return jnp.broadcast_to(total / jnp.maximum(jnp.sum(valid, axis=0, keepdims=True, dtype=float), 1), log_ratio.shape)


def sequence_token_log_ratio(log_ratio: jax.Array, mask: jax.Array) -> jax.Array:
    """The value of the sequence's log-ratio, with the gradient of the step's; 0 on invalid steps.

        sg(s_i) + log_ratio_it - sg(log_ratio_it)

    GSPO-token (https://arxiv.org/abs/2507.18071, section 4.3): for advantages that differ along a sequence.
    """
    valid = mask.astype(bool)
    log_ratio = jnp.where(valid, at_least_float32(log_ratio), 0.0)
    constant = jax.lax.stop_gradient(sequence_log_ratio(log_ratio, mask) - log_ratio)  # sg(s_i) - sg(log_ratio_it)
    return jnp.where(valid, log_ratio + constant, 0.0)


def check_together(batch: Batch, field: str, slot: str) -> None:
    """Raises ValueError unless the update keeps together what a slot compares."""
    if not getattr(batch, field):
        what = "the steps of a sequence" if field == "whole_sequences" else "the samples of a minibatch"
        raise ValueError(f"{slot} compares {what}, but the update splits them; set {field}=True in the algorithm")


def step_ratio(log_ratio: jax.Array, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """Each step has its own ratio."""
    return log_ratio


def sequence_ratio(log_ratio: jax.Array, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """The length-normalised ratio of the whole sequence, at each of its steps."""
    check_together(batch, "whole_sequences", "sequence_ratio")
    return sequence_log_ratio(log_ratio, batch.mask)


def sequence_token_ratio(log_ratio: jax.Array, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """The value of `sequence_ratio` with the gradient of each step's ratio (GSPO-token)."""
    check_together(batch, "whole_sequences", "sequence_token_ratio")
    return sequence_token_log_ratio(log_ratio, batch.mask)

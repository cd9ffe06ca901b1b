"""Probability ratios: of a step, of a sequence, and kept finite.

Log-ratios are in nats, and masks true on the valid steps; both are `[T, N]`, with a sequence along `T`.
"""

import jax
import jax.numpy as jnp

from grpo_jax.hyperparams import Hyperparams
from grpo_jax.objectives.divergences import MAX_LOG_RATIO
from grpo_jax.precision import at_least_float32
from grpo_jax.types import Batch

__all__ = ["geometric_mean_log_ratio", "geometric_mean_ratio", "importance_ratio", "sequence_log_ratio"]
__all__ += ["sequence_ratio", "sequence_token_log_ratio", "sequence_token_ratio", "step_ratio", "vespo_log_weight"]
__all__ += ["vespo_ratio"]


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


def geometric_mean_log_ratio(
    log_ratio: jax.Array, advantages: jax.Array, mask: jax.Array, *, clip_low: float, clip_high: float
) -> jax.Array:
    """GMPO's sequence log-ratio: the mean of log-ratios, each clipped on the pessimistic side.

        1/|y_i| sum_t (min(log_ratio_it, clip_high) if A_it > 0 else max(log_ratio_it, -clip_low))

    https://arxiv.org/abs/2507.20673. Its objective is `exp(.) * advantage`, reduced by `mean_of_sequence_means`, for
    advantages that are constant along a sequence; only their sign is used here. `clip_low` and `clip_high` are in nats,
    >= 0 (the paper: 0.4): they clip the log-ratio, not the ratio. 0 for a sequence without a valid step.
    """
    log_ratio = at_least_float32(log_ratio)
    clipped = jnp.where(advantages > 0, jnp.minimum(log_ratio, clip_high), jnp.maximum(log_ratio, -clip_low))
    return sequence_log_ratio(clipped, mask)


def vespo_log_weight(
    log_ratio: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    positive: tuple[float, float] = (2.0, 3.0),
    negative: tuple[float, float] = (3.0, 2.0),
) -> jax.Array:
    """VESPO's log-weight of a sequence, with the gradient of each step's log-ratio.

        log w_i = lambda + k S_i - lambda exp(S_i),  S_i = clip(sum_t log_ratio_it, log 1e-8, 20)

    https://arxiv.org/abs/2602.10693: a soft gate of the whole sequence's ratio, not length-normalised. Its objective is
    `exp(.) * advantage`. `positive` is (k, lambda) where the advantage is at least 0, `negative` elsewhere.
    """
    valid = mask.astype(bool)
    step = jnp.where(valid, jnp.clip(at_least_float32(log_ratio), -MAX_LOG_RATIO, MAX_LOG_RATIO), 0.0)
    total = jnp.clip(jnp.sum(step, axis=0, keepdims=True), jnp.log(1e-8), MAX_LOG_RATIO)  # S_i
    k, scale = (jnp.where(advantages >= 0, a, b) for a, b in zip(positive, negative, strict=True))
    scale = jnp.maximum(scale, 1e-4)
    weight = jnp.broadcast_to(scale + k * total - scale * jnp.exp(total), log_ratio.shape)
    # log w_i, with the gradient of log_ratio_it: sg(log w_i) + log_ratio_it - sg(log_ratio_it)
    return log_ratio + jax.lax.stop_gradient(jnp.maximum(weight, -100.0) - log_ratio)


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


def geometric_mean_ratio(log_ratio: jax.Array, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """The geometric mean of the sequence's clipped ratios, at each of its steps."""
    check_together(batch, "whole_sequences", "geometric_mean_ratio")
    return geometric_mean_log_ratio(
        log_ratio, batch.advantage, batch.mask, clip_low=hyperparams.clip_low, clip_high=hyperparams.clip_high
    )


def vespo_ratio(log_ratio: jax.Array, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """VESPO's weight of the whole sequence, with the gradient of each step's log-ratio."""
    check_together(batch, "whole_sequences", "vespo_ratio")
    return vespo_log_weight(log_ratio, batch.advantage, batch.mask)

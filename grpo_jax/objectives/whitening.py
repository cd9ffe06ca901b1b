"""Centred and scaled numbers, exactly 0 where all are equal up to rounding."""

import jax
import jax.numpy as jnp

from grpo_jax.precision import above_rounding, at_least_float32

__all__ = ["scale_by_rms", "whiten"]


def whiten(advantages: jax.Array, mask: jax.Array | None = None, *, eps: float = 1e-8, ddof: int = 0) -> jax.Array:
    """Advantages in standard deviations from their mean, over all valid entries: PPO's normalisation of a minibatch.

        (A - mean(A)) / (std(A) + eps)

    Args:
      advantages: any shape.
      mask: the same shape, true on the valid entries; all of them without it.
      eps: added to the standard deviation, in the units of the advantages.
      ddof: 0 for the population's standard deviation, 1 for the root of the unbiased variance.

    Returns:
      The same shape; exactly 0 if all valid entries are equal, and on invalid ones.
    """
    valid = None if mask is None else mask.astype(bool)
    deviations = centred(advantages, valid, axis=None)
    return deviations / (std(deviations, valid, axis=None, ddof=ddof) + eps)


def scale_by_rms(advantages: jax.Array, mask: jax.Array | None = None, *, eps: float = 1e-8) -> jax.Array:
    """Advantages divided by their root mean square over all valid entries: signs stay as they are.

        A / (sqrt(mean(A^2)) + eps)

    For advantages relative to a baseline, whose signs say what was better than expected. Arguments and result as in
    `whiten`.
    """
    valid = jnp.ones(advantages.shape, bool) if mask is None else mask.astype(bool)
    valued = jnp.where(valid, at_least_float32(advantages), 0.0)
    return valued / (std(valued, valid, axis=None, ddof=0) + eps)


def centred(x: jax.Array, valid: jax.Array | None = None, axis=-1) -> jax.Array:
    """The deviations from the mean over `axis`; 0 where not valid, and where all differ by no more than rounding."""
    x = at_least_float32(x)
    # float32 means are off by an ulp, so the mean of equal numbers need not equal them; the mean of zeros does.
    valid = jnp.ones(x.shape, bool) if valid is None else valid.astype(bool)
    lowest = jnp.min(x, axis, keepdims=True, where=valid, initial=jnp.inf)
    highest = jnp.max(x, axis, keepdims=True, where=valid, initial=-jnp.inf)
    differs = above_rounding(highest - lowest, highest, lowest) != 0
    shifted = jnp.where(valid & differs, x - lowest, 0.0)
    mean = jnp.sum(shifted, axis, keepdims=True) / jnp.maximum(jnp.sum(valid, axis, keepdims=True, dtype=float), 1)
    return jnp.where(valid, shifted - mean, 0.0)


def std(deviations: jax.Array, valid: jax.Array | None = None, axis=-1, *, ddof: float) -> jax.Array:
    """Standard deviation over `axis`, which is kept, of deviations from a mean, as `centred` returns them."""
    # In float32 the square of 1e30 overflows and that of 1e-30 vanishes: divide by the largest deviation first.
    largest = jnp.max(jnp.abs(deviations), axis, keepdims=True, initial=0.0)
    scale = jnp.where(largest == 0, 1.0, largest)
    count = jnp.sum(jnp.ones(deviations.shape, bool) if valid is None else valid, axis, keepdims=True, dtype=float)
    squares = jnp.sum(jnp.square(deviations / scale), axis, keepdims=True)
    variance = squares / jnp.maximum(count - ddof, 1)
    return largest * jnp.sqrt(jnp.where(largest == 0, 1.0, variance))  # the slope of a root is infinite at 0

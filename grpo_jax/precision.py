"""The precision of formulas."""

import functools

import jax
import jax.numpy as jnp

exact_sum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
"""`jnp.einsum` with products in full precision, on accelerators too."""


def at_least_float32(x: jax.Array) -> jax.Array:
    """Converts to float32 or keeps float64. Every public function on plain arrays does this first.

    Half precision (float16, bfloat16) becomes float32, because in it squares, ratios and floors such as eps = 1e-6
    overflow or vanish. Integers and booleans become JAX's default float.

    Args:
      x: an array, or anything that `jnp.asarray` converts to one.

    Returns:
      An array of the same shape. Gradients with respect to `x` have the precision of `x`.
    """
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(float)
    return x if jnp.finfo(x.dtype).bits >= 32 else x.astype(jnp.float32)


def nan_where(condition: jax.Array) -> jax.Array:
    """NaN where the condition is true, else 0. A constant NaN would stop `jax_debug_nans` whatever the condition."""
    return 0.0 / jnp.where(condition, 0.0, 1.0)

"""The precision that formulas are computed in."""

import jax
import jax.numpy as jnp


def at_least_float32(x: jax.Array) -> jax.Array:
    """Converts to float32, or keeps float64: what every function on plain arrays does first.

    float32 and float64 stay as they are. Half precision (float16, bfloat16) becomes float32: squares, ratios and
    floors such as eps = 1e-6 overflow or vanish in it. Integers and booleans become JAX's default float.

    Args:
      x: an array, or anything that makes one.

    Returns:
      The same shape. A gradient that flows back has the precision of `x`.
    """
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(float)
    return x if jnp.finfo(x.dtype).bits >= 32 else x.astype(jnp.float32)

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


ROUNDING = 16.0
"""Two results of one computation that differ by at most this many eps of their size are equal.

Measured between the programs of a rollout and of its update, in eps of the log-probabilities: 0 for an MLP,
2 for a CNN and a GRU, 7 for a transformer. A change of one in 10^5 is 84 eps: it counts in full.
"""


def above_rounding(difference: jax.Array, *numbers: jax.Array, least: float = 0.0) -> jax.Array:
    """The difference; 0, with slope 0, where rounding alone may have made it from equal numbers.

        0  if |difference| <= ROUNDING eps max(least, |numbers|)

    eps is that of float32 or float64, and one more of the numbers' own where they come in half precision.

    Args:
      difference: any shape; NaN and infinite ones stay.
      numbers: of shapes that broadcast with it: what it is a difference of, or the sum of the absolute values of what
        that is a sum of. One that is not finite has no size.
      least: the smallest size that counts.
    """
    sizes = [jnp.abs(at_least_float32(number)) for number in numbers]
    size = functools.reduce(jnp.maximum, [jnp.where(jnp.isfinite(size), size, 0.0) for size in sizes])
    own = max(
        [float(jnp.finfo(number.dtype).eps) for number in numbers if number.dtype in (jnp.float16, jnp.bfloat16)],
        default=0.0,
    )
    floor = (ROUNDING * float(jnp.finfo(size.dtype).eps) + own) * jnp.maximum(size, least)
    return jnp.where(jnp.abs(difference) <= jax.lax.stop_gradient(floor), 0.0, difference)

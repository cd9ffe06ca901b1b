"""Numbers of 4 bytes and truth values as words, so that arrays of different types lie in one array.

Words are int32: XLA's Triton kernels on a mesh do not convert unsigned ones.
"""

from typing import Any

import jax
import jax.numpy as jnp


def has_words(dtype: Any) -> bool:
    """Whether `to_words` takes arrays of this type."""
    is_truth = jnp.issubdtype(dtype, jnp.bool_)
    return is_truth or (jnp.issubdtype(dtype, jnp.number) and jnp.dtype(dtype).itemsize == 4)


def to_words(x: jax.Array) -> jax.Array:
    """int32 of the same shape: the bits of numbers of 4 bytes, or 0 and 1 for truth values."""
    return x.astype(jnp.int32) if jnp.issubdtype(x.dtype, jnp.bool_) else jax.lax.bitcast_convert_type(x, jnp.int32)


def from_words(words: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `to_words`."""
    return words != 0 if jnp.issubdtype(dtype, jnp.bool_) else jax.lax.bitcast_convert_type(words, dtype)

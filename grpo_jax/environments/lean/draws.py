"""JAX's random numbers from fewer kernels: without arrays of keys, which are stored in between."""

import jax
import jax.numpy as jnp


def child(key: jax.Array, i: int, n: int) -> jax.Array:
    """`jax.random.split(key, n)[i]`."""
    return jax.random.fold_in(key, i) if _splits_by_folding(key) else jax.random.split(key, n)[i]


def randint(key: jax.Array, shape: tuple[int, ...], n: int) -> jax.Array:
    """`jax.random.randint(key, shape, 0, n)`."""
    if jax.config.jax_enable_x64 or not _splits_by_folding(key):  # with 64 bits it draws others
        return jax.random.randint(key, shape, 0, n)
    high, low = (jax.random.bits(child(key, i, 2), shape, jnp.uint32) % n for i in range(2))
    return ((high * (2**32 % n) + low) % n).astype(jnp.int32)


def _splits_by_folding(key: jax.Array) -> bool:
    """Whether JAX splits such a key by folding in numbers: by default it does."""
    return jax.config.jax_threefry_partitionable and str(jax.random.key_impl(key)) in ("threefry2x32", "rbg")

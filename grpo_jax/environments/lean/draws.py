"""JAX's random numbers from fewer kernels: without arrays of keys, which are stored in between."""

import jax
import jax.numpy as jnp


def child(key: jax.Array, i: int) -> jax.Array:
    """`jax.random.split(key, n)[i]` for any `n`, with JAX's default `jax_threefry_partitionable`."""
    return jax.random.fold_in(key, i)


def randint(key: jax.Array, shape: tuple[int, ...], n: int) -> jax.Array:
    """`jax.random.randint(key, shape, 0, n)`."""
    if jax.config.jax_enable_x64:  # it then draws 64 bits
        return jax.random.randint(key, shape, 0, n)
    high, low = (jax.random.bits(child(key, i), shape, jnp.uint32) % n for i in range(2))
    return ((high * (2**32 % n) + low) % n).astype(jnp.int32)

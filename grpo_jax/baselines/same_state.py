"""States that are the same, known by hashes of their bits."""

import jax
import jax.numpy as jnp

from grpo_jax.precision import at_least_float32
from grpo_jax.types import PyTree


def state_numbers(state: PyTree, size: int) -> jax.Array:
    """Numbers `[M]` below `M` that are equal for the same state.

    Args:
      state: each leaf `[T, N, ...]`, of `M` states; two are the same if 64 bits of hash are.
      size: `M = T * N`.
    """
    words = [_words(leaf.reshape(size, -1)) for leaf in jax.tree.leaves(state)]
    hashes = [jnp.sum(each, axis=1, dtype=jnp.uint32) for each in _mixed_words(jnp.concatenate(words, axis=1))]
    *hashes, order = jax.lax.sort((*hashes, jnp.arange(size)), num_keys=2)
    a, b = (jnp.concatenate([jnp.zeros(1, bool), each[1:] != each[:-1]]) for each in hashes)
    return jnp.zeros(size, jnp.int32).at[order].set(jnp.cumsum(a | b, dtype=jnp.int32))


def _words(x):
    """The bits of `[M, E]` but the sign of a zero, uint32 `[M, words]`."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = jnp.where(x == 0, 0.0, at_least_float32(x))
    elif x.dtype.itemsize < 4:
        x = x.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(x, jnp.uint32).reshape(x.shape[0], -1)


def prefix_hashes(tokens: jax.Array) -> jax.Array:
    """64 bits of hash of the tokens up to each step: uint32 `[T, N, 2]`, of int32 tokens `[T, N]`."""
    words = tokens.astype(jnp.uint32).T
    return jnp.stack([jnp.cumsum(each, axis=1, dtype=jnp.uint32).T for each in _mixed_words(words)], axis=-1)


def _mixed_words(words):
    """Each word of `[M, words]` hashed with its place, in two ways."""
    place = jnp.arange(words.shape[1], dtype=jnp.uint32)
    salts = [_mixed(place + jnp.uint32(offset)) for offset in (0x9E3779B9, 0x3C6EF372)]
    return [_mixed(words ^ salt[None]) for salt in salts]


def _mixed(x):
    """MurmurHash3's finaliser: a bijection of uint32, each bit of which depends on all."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)

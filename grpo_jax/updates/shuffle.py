"""A random order of a batch from one sort, which is most of what shuffling costs."""

import jax
import jax.numpy as jnp

from grpo_jax.config_checks import MAX_SAMPLES


def shuffled_order(key: jax.Array, valid: jax.Array) -> jax.Array:
    """Indices of a batch in random order, the valid samples before the others.

    One uint32 for each sample is sorted: a bit for "not valid", then random bits, then the index. Samples whose random
    bits coincide are ordered by an index that went through a random affine bijection, which is random enough.

    Args:
      key: of the order.
      valid: `[n]` bool; n at most `MAX_SAMPLES`.

    Returns:
      `[n]` int32, a permutation of 0 … n-1.

    Raises:
      ValueError: more samples than `MAX_SAMPLES`.
    """
    num_samples = valid.shape[0]
    index_bits = max(num_samples - 1, 1).bit_length()
    if num_samples > MAX_SAMPLES:
        raise ValueError(f"{num_samples} samples in one batch are more than 2^26; use fewer num_envs or num_steps")
    index_mask = jnp.uint32(2**index_bits - 1)
    key_bits, key_map = jax.random.split(key)
    random = jax.random.bits(key_bits, (num_samples,), jnp.uint32) << index_bits
    factor, offset = jax.random.bits(key_map, (2,), jnp.uint32)
    factor = factor | 1  # odd, hence a bijection modulo a power of two

    mapped = (factor * jnp.arange(num_samples, dtype=jnp.uint32) + offset) & index_mask
    invalid = jnp.where(valid, jnp.uint32(0), jnp.uint32(1)) << 31
    packed = jnp.sort(invalid | ((random | mapped) & jnp.uint32(2**31 - 1)))
    order = (packed & index_mask) - offset
    return ((order * _inverse(factor)) & index_mask).astype(jnp.int32)


def _inverse(odd: jax.Array) -> jax.Array:
    """Inverse of an odd number modulo 2^32, by Newton's iteration: 3 correct bits at first, twice as many each time."""
    inverse = odd
    for _ in range(4):
        inverse = inverse * (jnp.uint32(2) - odd * inverse)
    return inverse

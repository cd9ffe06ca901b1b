"""Random orders of the sequences of a batch, which deal them out to minibatches."""

import functools
import math

import jax
import jax.numpy as jnp

from grpo_jax.config import Config
from grpo_jax.updates.batch import trains_on_all_steps

SMALLEST_FACTOR = 64
"""Orders of a number without two factors of at least this are sorted. Others, of 4096 or more, are computed for each
index, which is several times faster; with few rows they would be little more than shifts."""

NUM_ROUNDS = 4


def minibatch_order(config: Config, key: jax.Array, mask: jax.Array) -> jax.Array:
    """`[U, K, n]`: the sequences of a batch, dealt out in another random order each epoch, `n` of each of `K` blocks.

    Args:
      config: the numbers of epochs, minibatches and blocks, and of neighbouring members that stay together.
      key: of the orders.
      mask: `[S, N]` bool; sequences with a valid sample are dealt out first, and evenly.
    """
    num_epochs, num_blocks, members = config.num_epochs, config.shuffle_blocks, config.members_together
    num_minibatches = config.num_minibatches
    filled = jnp.any(mask.reshape(mask.shape[0], num_blocks, -1, members), axis=(0, 3))
    filled = jnp.broadcast_to(filled, (num_epochs, *filled.shape))
    if _factors(filled.shape[-1]) is None:
        units = jnp.swapaxes(sorted_order(key, filled).reshape(*filled.shape[:2], -1, num_minibatches), 2, 3)
    elif trains_on_all_steps(config):
        units = computed_order(key, filled.shape, num_minibatches)
    else:
        units = first_where(filled, computed_order(key, filled.shape), num_minibatches)
    units = units.reshape(num_epochs, num_blocks, num_minibatches, -1, 1)
    sequences = units * members + jnp.arange(members).reshape(1, 1, 1, 1, -1)
    return jnp.moveaxis(sequences, 2, 1).reshape(num_epochs * num_minibatches, num_blocks, -1)


def sorted_order(key: jax.Array, valid: jax.Array) -> jax.Array:
    """`[..., n]` int32: the indices 0 … n-1 in random orders, those of valid samples before the others.

    One uint32 for each sample is sorted: a bit for "not valid", then random bits, then the index. That takes an eighth
    of the time of `jax.random.permutation`. Samples whose random bits coincide keep their order.

    Args:
      key: of the orders.
      valid: `[..., n]` bool; n at most `config_checks.MAX_SAMPLES`, so that five random bits are left.
    """
    index = jax.lax.broadcasted_iota(jnp.uint32, valid.shape, valid.ndim - 1)
    index_mask = jnp.uint32(2 ** max(valid.shape[-1] - 1, 1).bit_length() - 1)
    random = jnp.where(valid, jnp.uint32(0), jnp.uint32(2**31)) | jax.random.bits(key, valid.shape, jnp.uint32) >> 1
    return (jnp.sort((random & ~index_mask) | index) & index_mask).astype(jnp.int32)


def computed_order(key: jax.Array, shape: tuple[int, ...], num_minibatches: int = 1) -> jax.Array:
    """`[..., n]` int32: the indices 0 … n-1 in random orders, each place computed by itself, without a sort.

    With `n = a b`, an index is a row x and a column y. Each round shifts the row by a keyed hash of the column, then
    the column by one of the row: `x += F(y) mod a`, `y += F(x) mod b`. Every shift can be undone, so the result is a
    permutation: a Feistel network (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).

    Args:
      key: of the orders.
      shape: of the result; n has two factors from `SMALLEST_FACTOR` to 2^16.
      num_minibatches: each order is dealt out to so many, which come one after the other in the result.
    """
    rows, columns = _factors(shape[-1])
    keys = jax.random.bits(key, (*shape[:-1], 1, 2 * NUM_ROUNDS), jnp.uint32)
    keys = jnp.moveaxis(keys.reshape(*shape[:-1], 1, NUM_ROUNDS, 2), (-2, -1), (0, 1))

    def shift(place, keys):
        x, y = place
        x = (x + _hash(y, keys[0], rows)) % rows
        return (x, (y + _hash(x, keys[1], columns)) % columns), None

    index = jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
    index = _transposed(index, shape[-1] // num_minibatches, num_minibatches)
    rounds = functools.partial(jax.lax.scan, shift, (index // columns, index % columns))
    # One kernel on an accelerator; a CPU would only compile longer.
    unrolled = functools.partial(rounds, unroll=NUM_ROUNDS)
    (x, y), _ = jax.lax.platform_dependent(keys, cpu=rounds, default=unrolled)
    return (x * columns + y).astype(jnp.int32)


def first_where(valid: jax.Array, order: jax.Array, num_minibatches: int) -> jax.Array:
    """The orders `[..., n]` with the valid indices before the others, both as they were, dealt out to minibatches."""
    valid = jnp.take_along_axis(valid, order, axis=-1, mode="promise_in_bounds")
    num_before = jnp.cumsum(valid, axis=-1, dtype=jnp.int32)
    index = jax.lax.broadcasted_iota(jnp.int32, valid.shape, valid.ndim - 1)
    place = jnp.where(valid, num_before - 1, num_before[..., -1:] + index - num_before)
    place = _transposed(place.astype(jnp.uint32), num_minibatches, order.shape[-1] // num_minibatches)
    return jnp.put_along_axis(jnp.zeros_like(order), place, order, axis=-1, inplace=False, mode="promise_in_bounds")


def _transposed(index: jax.Array, num_columns: int, num_rows: int) -> jax.Array:
    """Places in a table, row by row, as places in its transpose: a TPU would pad the table, of few columns, itself."""
    return index % num_columns * num_rows + index // num_columns


def _factors(n: int) -> tuple[int, int] | None:
    """The two factors of n nearest to each other; None where the order is to be sorted."""
    rows = next(a for a in range(math.isqrt(n), 0, -1) if n % a == 0)
    return (rows, n // rows) if rows >= SMALLEST_FACTOR and n // rows <= 2**16 else None


def _hash(x: jax.Array, key: jax.Array, size: int) -> jax.Array:
    """Keyed uint32 hashes below `size`, which is at most 2^16: products and shifts, as of MurmurHash3."""
    bits = (x ^ key) * jnp.uint32(0x9E3779B1)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return ((bits >> 16) * jnp.uint32(size)) >> 16

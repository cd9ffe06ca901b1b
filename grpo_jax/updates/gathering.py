"""Samples of a batch at scattered indices, narrow arrays by one gather for all of them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.devices.words import from_words, has_words, to_words
from grpo_jax.types import PyTree

CACHE_LINE = 16
"""Words of 4 bytes that a processor reads at once."""


def make_gather(tree: PyTree, num_blocks: int = 1) -> Callable[[jax.Array], PyTree]:
    """`take(indices [K, n])`: the samples at `indices`, each leaf `[S, N, ...]` of the tree as `[S, K * n, ...]`.

    `N` is `num_blocks` (`K`) blocks of equal size, one after the other; row k of `indices` is within block k.

    A gather takes one memory access for each sample and array. Leaves of 4-byte numbers or booleans
    that are narrower than a cache line are therefore packed side by side into one array, in which a sample is one row.
    That saves about 4% of a train step on CartPole, on one CPU core. Other leaves are gathered one by one. Values are
    bitwise unchanged, and no gradient passes.

    Indices must lie in 0 … N/K - 1; the result for others is undefined.
    """
    tree = jax.lax.stop_gradient(tree)
    leaves, structure = jax.tree.flatten(tree)
    words = [_as_words(leaf) for leaf in leaves]
    narrow = [part for part in words if part is not None]
    ends = np.cumsum([part.shape[-1] for part in narrow])[:-1]
    # The barrier stops XLA from packing again in each gather.
    packed = jax.lax.optimization_barrier(jnp.concatenate(narrow, axis=-1)) if narrow else None

    def take(indices):
        def gather(leaf):
            if num_blocks == 1:  # the mapped gather below takes twice the memory on a TPU
                return _rows(leaf, indices[0])
            # Mapped over the blocks: a partitioner then knows that each block's samples stay on its device.
            blocks = leaf.reshape(leaf.shape[0], num_blocks, -1, *leaf.shape[2:])
            taken = jax.vmap(_rows, in_axes=(1, 0), out_axes=1)(blocks, indices)
            return taken.reshape(leaf.shape[0], -1, *leaf.shape[2:])

        rows = iter(jnp.split(gather(packed), ends, axis=-1) if narrow else ())
        return structure.unflatten(
            gather(leaf) if part is None else _from_words(next(rows), leaf)
            for leaf, part in zip(leaves, words, strict=True)
        )

    return take


def _rows(leaf, indices):
    return leaf.at[:, indices].get(mode="promise_in_bounds")


def _as_words(leaf: jax.Array) -> jax.Array | None:
    """`[S, N, words]` int32; None for a leaf that is wide, or of a type that is not 4 bytes or a truth value."""
    flat = leaf.reshape(*leaf.shape[:2], -1)
    return to_words(flat) if flat.shape[-1] < CACHE_LINE and has_words(leaf.dtype) else None


def _from_words(words: jax.Array, like: jax.Array) -> jax.Array:
    return from_words(words, like.dtype).reshape(*words.shape[:2], *like.shape[2:])

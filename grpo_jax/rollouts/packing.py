"""Many arrays in one: a loop then copies one array in each step instead of one for each leaf of a tree.

The packed array is `[K, B]`, with the environments last: no padding on a TPU, whose tiles are 128 wide.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from grpo_jax.devices.words import from_words, has_words, to_words
from grpo_jax.types import PyTree

MAX_ROWS = 64
"""Leaves of more numbers for each environment are not packed: to copy them costs more than to launch a copy."""


@struct.dataclass
class Packed:
    """A tree of leaves `[B, ...]`; or a stack of such trees, if its arrays have leading axes."""

    rows: jax.Array  # [..., K, B] int32: the bits of the narrow leaves of 4-byte numbers and booleans
    others: list[jax.Array]  # the other leaves, [..., B, ...]
    structure: Any = struct.field(pytree_node=False)
    leaves: tuple[jax.ShapeDtypeStruct, ...] = struct.field(pytree_node=False)  # of one tree

    def unpack(self) -> PyTree:
        """The tree, or the stacked trees, each leaf `[..., B, ...]`."""
        lead, num_envs = self.rows.shape[:-2], self.rows.shape[-1]
        is_row = [_is_packed(leaf) for leaf in self.leaves]
        sizes = [leaf.size // num_envs for leaf, packed in zip(self.leaves, is_row, strict=True) if packed]
        rows = iter(jnp.split(self.rows, np.cumsum(sizes)[:-1], axis=-2) if sizes else ())
        others = iter(self.others)

        def leaf_from(rows, leaf):
            return jnp.moveaxis(from_words(rows, leaf.dtype), -1, len(lead)).reshape(*lead, *leaf.shape)

        return self.structure.unflatten(
            leaf_from(next(rows), leaf) if packed else next(others)
            for leaf, packed in zip(self.leaves, is_row, strict=True)
        )


def pack(tree: PyTree) -> Packed:
    """Packs a tree of leaves `[B, ...]`."""
    leaves, structure = jax.tree.flatten(tree)
    num_envs = leaves[0].shape[0]
    rows = [_as_rows(leaf) for leaf in leaves if _is_packed(leaf)]
    return Packed(
        rows=jnp.concatenate(rows) if rows else jnp.zeros((0, num_envs), jnp.int32),
        others=[leaf for leaf in leaves if not _is_packed(leaf)],
        structure=structure,
        leaves=tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves),
    )


def packed_step(step: Callable) -> Callable:
    """A step of `lax.scan` on packed carries, with packed outputs."""

    def run(carry, now):
        carry, output = step(carry.unpack(), now)
        return pack(carry), pack(output)

    return run


def _is_packed(leaf: jax.Array) -> bool:
    return has_words(leaf.dtype) and leaf.size <= MAX_ROWS * leaf.shape[0]


def _as_rows(leaf: jax.Array) -> jax.Array:
    """`[B, ...]` to `[K, B]` int32."""
    return to_words(jnp.moveaxis(leaf.reshape(leaf.shape[0], -1), 0, -1))

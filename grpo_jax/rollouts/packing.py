"""The records of several steps as few arrays: a loop on a GPU writes each array by a launch of its own."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from grpo_jax.types import PyTree

SMALL = "bool", "int32", "uint32", "float32"


class Packed(struct.PyTreeNode):
    """A tree of leaves `[k, B, ...]`, of which those `[k, B]` of `SMALL` dtypes are one array."""

    bits: jax.Array  # [n, k, B] uint32
    others: list[jax.Array]
    structure: Any = struct.field(pytree_node=False)
    dtypes: tuple[str, ...] = struct.field(pytree_node=False)  # of each leaf in `bits`; "" of the others


def pack(tree: PyTree) -> Packed:
    """The tree as few arrays."""
    leaves, structure = jax.tree.flatten(tree)
    dtypes = tuple(leaf.dtype.name if leaf.ndim == 2 and leaf.dtype.name in SMALL else "" for leaf in leaves)
    pairs = list(zip(leaves, dtypes, strict=True))
    bits = [leaf.astype("uint32") if dtype == "bool" else leaf.view("uint32") for leaf, dtype in pairs if dtype]
    return Packed(jnp.stack(bits), [leaf for leaf, dtype in pairs if not dtype], structure, dtypes)


def unpack(packed: Packed) -> PyTree:
    """The tree with leaves `[P, k, B, ...]`, of what was packed in each of `P` parts."""
    bits, others = iter(jnp.moveaxis(packed.bits, 1, 0)), iter(packed.others)

    def leaf(dtype):
        if not dtype:
            return next(others)
        return next(bits).astype(bool) if dtype == "bool" else next(bits).view(dtype)

    return jax.tree.unflatten(packed.structure, map(leaf, packed.dtypes))

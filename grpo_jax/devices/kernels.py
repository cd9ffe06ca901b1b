"""Kernels written with Pallas: how they are launched, and how they read and write arrays of many shapes.

A kernel takes few and large arrays. Parameters, coefficients and captured arrays therefore lie flat in one vector of
4-byte words, and samples in rows of words. Inside the kernel each array is a tile (see `tiles`).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from grpo_jax.devices.mesh import envs_are_split, model_is_split
from grpo_jax.devices.tile_operations import NotOnTiles, along, tile_shape
from grpo_jax.devices.words import from_words, has_words, to_words
from grpo_jax.errors import ConfigError
from grpo_jax.types import PyTree


def check_one_device(field: str) -> None:
    """Raises ConfigError if the mesh of the surrounding `over_rows` splits environments or policies over devices."""
    if envs_are_split() or model_is_split():
        raise ConfigError(
            f"{field}=True in the execution plan has a kernel for one device, but the mesh splits environments or "
            "policies over several; use a mesh of rows only, or execution_plan='gpu'"
        )


def launch(
    kernel: Callable, results: PyTree, *arguments: jax.Array, num_programs: int, num_warps: int, name: str
) -> PyTree:
    """Runs a kernel: compiled by Triton for a GPU, interpreted on a CPU.

    Args:
      kernel: a function of references to the arguments, whole, and then to the results; see Pallas.
      results: shapes of the results.
      arguments: arrays.
      num_programs: number of instances of the kernel, `pl.program_id(0)`.
      num_warps: groups of 32 threads in each instance.
      name: what profilers show.
    """

    def call(interpret, *arguments):
        params = None if interpret else triton.CompilerParams(num_warps=num_warps, num_stages=1)
        run = pl.pallas_call(
            *(kernel, results),
            grid=(num_programs,),
            interpret=interpret,
            compiler_params=params,
            name=name,
        )
        return run(*arguments)

    # Chosen by the platform of the compiled program. Ahead of time that is not the platform that compiles it.
    return jax.lax.platform_dependent(
        *arguments, cpu=functools.partial(call, True), cuda=functools.partial(call, False)
    )


def load(ref: Any, rows: jax.Array, *, at: Sequence[jax.Array] = ()) -> jax.Array:
    """In a kernel: the tile of some rows of an array.

    Args:
      ref: reference to the array, `[..., N, ...]`.
      rows: `[n]` int32, indices along the axis after those of `at`. Beyond its end the last row is read.
      at: indices along the first axes, which the tile does not have: scalars, or `[n]`, one for each row.
    """
    indices, _ = _row_indices(ref.shape, rows, at)
    sides = ref.shape[: len(indices)]
    return ref[tuple(jnp.minimum(index, side - 1) for index, side in zip(indices, sides, strict=True))]


def store(ref: Any, tile: jax.Array, rows: jax.Array, *, at: Sequence[jax.Array] = ()) -> None:
    """In a kernel: writes the tile of some rows of an array. The arguments are those of `load`."""
    indices, inside = _row_indices(ref.shape, rows, at)
    # Triton masks what lies outside; Pallas' interpreter drops it, as its index is out of bounds.
    triton.store(ref.at[indices], tile, mask=inside)


def _row_indices(shape, rows, at):
    """For each entry of the tile: its indices, and whether it lies in the array along the axes after those of `at`."""
    shape = shape[len(at) :]
    tile = tile_shape((len(rows), *shape[1:]))

    def spread(index):
        return jnp.broadcast_to(jnp.reshape(index, (-1, *(1,) * (len(tile) - 1))), tile)

    indices = [spread(rows), *(along(tile, axis) for axis in range(1, len(tile)))]
    inside = functools.reduce(jnp.logical_and, [i < side for i, side in zip(indices, shape, strict=True)])
    return (*map(spread, at), *indices), inside


class Vector:
    """The layout of arrays of any shapes in one vector of words. Arrays that are not used are left out."""

    def __init__(self, leaves: Sequence[Any], used: Sequence[bool] | None = None):
        """The layout of arrays like `leaves`, which may be shapes."""
        self.leaves, self.starts, self.size = _layout(leaves, used, num_leading=0)

    def pack(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """`[size]` int32."""
        chosen = [x for x, start in zip(leaves, self.starts, strict=True) if start is not None]
        return jnp.concatenate([_leaf_words(leaf).reshape(-1) for leaf in chosen])

    def load(self, ref: Any) -> list[jax.Array | None]:
        """In a kernel: the tiles of the arrays; None for those that are not used."""
        tiles = []
        for leaf, start in zip(self.leaves, self.starts, strict=True):
            if start is not None:
                index, inside = flat_index(leaf.shape)
                words = ref[jnp.where(inside, start + index, start)] if leaf.shape else ref[start]
            tiles.append(None if start is None else from_words(words, leaf.dtype))
        return tiles

    def store(self, ref: Any, row: jax.Array, tiles: Sequence[jax.Array]) -> None:
        """In a kernel: writes tiles into a row of `ref`, float32 `[rows, size]`."""
        for tile, leaf, start in zip(tiles, self.leaves, self.starts, strict=True):
            if not leaf.shape:
                ref[row, start] = tile
                continue
            index, inside = flat_index(leaf.shape)
            column = jnp.where(inside, start + index, self.size)
            triton.store(ref.at[row, column], tile, mask=inside)  # as in `store`

    def unpack(self, vector: jax.Array) -> list[jax.Array]:
        """The arrays, from their float32 entries `[size]`."""
        return [
            vector[start : start + math.prod(leaf.shape)].reshape(leaf.shape)
            for leaf, start in zip(self.leaves, self.starts, strict=True)
        ]


class Rows:
    """The layout of arrays `[1, N, ...]` of samples: a row of words for each sample. Unused arrays are left out."""

    def __init__(self, leaves: Sequence[Any], used: Sequence[bool] | None = None):
        """The layout of arrays like `leaves`, which may be shapes."""
        self.leaves, self.starts, self.size = _layout(leaves, used, num_leading=2)

    def pack(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """`[N, size]` int32."""
        chosen = [x for x, start in zip(leaves, self.starts, strict=True) if start is not None]
        return jnp.concatenate([_leaf_words(leaf).reshape(leaf.shape[1], -1) for leaf in chosen], axis=1)

    def load(self, ref: Any, rows: jax.Array) -> list[jax.Array | None]:
        """In a kernel: the tiles of the arrays `[1, n, ...]` at these rows, `[n]`; None for those that are not used."""
        tiles = []
        for leaf, start in zip(self.leaves, self.starts, strict=True):
            if start is not None:
                tile = tile_shape((1, len(rows), *leaf.shape[2:]))
                index, inside = flat_index((1, 1, *leaf.shape[2:]))
                column = jnp.broadcast_to(jnp.where(inside, start + index, start), tile)
                row = jnp.broadcast_to(rows.reshape(1, -1, *(1,) * (len(tile) - 2)), tile)
            tiles.append(None if start is None else from_words(ref[row, column], leaf.dtype))
        return tiles


def _layout(leaves, used, num_leading):
    """Shapes, the first word of each array (None if it is not used), and the number of words."""
    leaves = [jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]
    starts, size = [], 0
    for leaf, is_used in zip(leaves, [True] * len(leaves) if used is None else used, strict=True):
        starts.append(size if is_used else None)
        size += math.prod(leaf.shape[num_leading:]) if is_used else 0
    return leaves, starts, size


def _leaf_words(leaf: jax.Array) -> jax.Array:
    leaf = jnp.asarray(leaf)
    if not has_words(leaf.dtype):
        raise NotOnTiles(f"arrays of {leaf.dtype}")
    return to_words(leaf)


def flat_index(shape: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """For each entry of the tile of an array: its index in the flat array, and whether it lies in the array."""
    tile = tile_shape(shape)
    index, inside = jnp.zeros(tile, jnp.int32), jnp.ones(tile, bool)
    for axis, side in enumerate(shape):
        if side > 1:
            index += along(tile, axis) * math.prod(shape[axis + 1 :])
        if side < tile[axis]:
            inside &= along(tile, axis) < side
    return index, inside

"""What both kernels share: their grid, tiles of samples loaded in turns, products, activations."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from grpo_jax.kernels.layout import BIG, HALF, LARGEST_SMALL, SAMPLES, SMALL, Shape

MULTIPROCESSORS = 132  # of an H100 and an H200
# Registers of a tile as it is read, [rows, 64]: 16 samples in each warp, four neighbours in each thread.
_ROWS = plgpu.Layout.TILED(
    plgpu.Tiling(((8, SAMPLES), (8, 16), (4,))), warp_dims=(-4,), lane_dims=(-3, -2), vector_dim=-1
)


def half_memory(*shape: int):
    """Shared memory in float16, in the order that tensor cores read."""
    return plgpu.SMEM(shape, HALF, transforms=(plgpu.TilingTransform((8, 16)), plgpu.SwizzleTransform(32)))


def turned(ref):
    """The transposed matrix."""
    return ref.transpose((1, 0))


def product(shape: tuple[int, int], *pairs) -> jax.Array:
    """The sum of matrix products, float32; a left operand may be in registers."""

    def run(sums):
        for left, right in pairs:
            plgpu.wgmma(sums, left, right)
        return sums[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def activate(name: str, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """The activation and its derivative; None for the latter if it follows from the former (`slope`)."""
    if name == "tanh":
        return jnp.tanh(x), None
    if name == "relu":
        return jnp.maximum(x, 0.0), None
    if name == "silu":
        gate = 0.5 + 0.5 * jnp.tanh(0.5 * x)
        return x * gate, gate * (1.0 + x * (1.0 - gate))
    root, cube = math.sqrt(2 / math.pi), 0.044715
    gate = 0.5 + 0.5 * jnp.tanh(root * (x + cube * x * x * x))
    return x * gate, gate * (1.0 + x * (1.0 - gate) * 2 * root * (1.0 + 3 * cube * x * x))


def slope(name: str, value: jax.Array) -> jax.Array:
    """The derivative of tanh or ReLU from its value, which may be scaled for ReLU."""
    return 1.0 - value * value if name == "tanh" else jnp.where(value > 0.0, 1.0, 0.0)


class Launch:
    """A grid of (seeds, networks, blocks): a block is a warpgroup, which takes tiles in turns."""

    def __init__(self, shape: Shape, seeds: int, samples: int, resident: int, copies: int):
        """So many blocks are `resident` on a multiprocessor at once; so many `copies` read a tile."""
        self.shape, self.networks, self.copies = shape, len(shape.outputs), copies
        self.tiles = samples // SAMPLES
        self.blocks = min(self.tiles, max(1, MULTIPROCESSORS * resident // (seeds * self.networks)))
        self.grid = {
            "grid": (seeds, self.networks, self.blocks),
            "grid_names": ("seed", "network", "block"),
            "compiler_params": plgpu.CompilerParams(approx_math=True),
        }
        self.scratch = {
            "layers": [half_memory(rows, shape.width) for rows in shape.sections],
            "tile": plgpu.SMEM((2, shape.read, SAMPLES), jnp.float32),
            "operand": half_memory(shape.rows, SAMPLES),
            "weights_ready": plgpu.Barrier(num_arrivals=len(shape.sections)),
            "ready": plgpu.Barrier(num_arrivals=max(copies, 1), num_barriers=2),
        }

    def run(self, inputs, weights, gradients, scratch, body: Callable) -> None:
        """Runs `body(tile, memory)` for each tile of this block, and fetches the next one meanwhile."""
        seed, network, block = map(jax.lax.axis_index, ("seed", "network", "block"))
        start, ones, ready = 0, self.shape.ones, scratch["ready"]
        for rows, memory in zip(self.shape.sections, scratch["layers"], strict=True):
            plgpu.copy_gmem_to_smem(weights.at[seed, network, pl.ds(start, rows)], memory, scratch["weights_ready"])
            start += rows
        number = jax.lax.div(self.tiles - block + self.blocks - 1, self.blocks)

        def fetch(turn, slot):
            def copy(source, start, rows):  # rows that are not there become 0
                part = source.at[seed, pl.ds(0 * seed, rows), pl.ds((block + turn * self.blocks) * SAMPLES, SAMPLES)]
                plgpu.copy_gmem_to_smem(part, scratch["tile"].at[slot, pl.ds(start, rows)], ready.at[slot])

            if self.shape.inputs is not None:
                copy(inputs, ones + 1, self.shape.read - ones - 1)
            for index, gradient in enumerate(gradients):
                pl.when(network == index)(functools.partial(copy, gradient, 0, ones))

        fetch(0, 0)
        plgpu.barrier_wait(scratch["weights_ready"])

        @pl.loop(0, number)
        def _(turn):
            slot = jax.lax.rem(turn, 2)
            if self.copies:
                pl.when(turn + 1 < number)(functools.partial(fetch, turn + 1, 1 - slot))
                plgpu.barrier_wait(ready.at[slot])
            body(block + turn * self.blocks, scratch["tile"].at[slot])

    def prepare(self, tile, operand, scale=None) -> None:
        """Writes the operand of the products from a tile in float32; without a scale, gradients are 0."""
        x, ones = plgpu.load(tile, layout=_ROWS, optimized=False), self.shape.ones
        row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=_ROWS)
        first = jnp.where(row == ones, 1.0, 0.0 if scale is None else x * scale)
        is_small = jnp.abs(x) < LARGEST_SMALL
        observed = 0.0 if self.shape.inputs is None else jnp.where(is_small, x * SMALL, 0.0)
        operand[: self.shape.read] = jnp.where(row <= ones, first, observed).astype(HALF)
        if self.shape.inputs is not None:
            operand[self.shape.read :] = jnp.where(is_small | (row <= ones), 0.0, x * BIG).astype(HALF)
        plgpu.commit_smem()

"""What both kernels share: their grid, tiles of samples loaded in turns, products, activations."""

import functools
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
    root = 0.7978845608028654  # of 2 / pi
    turn = jnp.tanh(root * (x + 0.044715 * x * x * x))
    return 0.5 * x * (1.0 + turn), 0.5 * (1.0 + turn) + 0.5 * x * (1.0 - turn * turn) * root * (
        1.0 + 3 * 0.044715 * x * x
    )


def has_own_slope(name: str) -> bool:
    """Whether the derivative of the activation does not follow from its value."""
    return name not in ("tanh", "relu")


def slope(name: str, value: jax.Array) -> jax.Array:
    """The derivative of tanh or ReLU from its value, which may be scaled for ReLU."""
    return 1.0 - value * value if name == "tanh" else jnp.where(value > 0.0, 1.0, 0.0)


class Launch:
    """A grid of (seeds, networks, blocks): a block is a warpgroup, which takes tiles in turns."""

    def __init__(self, shape: Shape, seeds: int, samples: int, resident: int, copies: int):
        """`resident` blocks are on a multiprocessor at once; a tile is read by so many `copies`."""
        self.shape, self.networks, self.copies = shape, len(shape.outputs), copies
        self.tiles = -(-samples // SAMPLES)
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

    def run(self, weights_memory, scratch, load: Callable, body: Callable) -> None:
        """Runs `body(tile)` for each tile of this block, while `load(tile, memory, barrier)` fetches the next one."""
        seed, network, block = map(jax.lax.axis_index, ("seed", "network", "block"))
        start = 0
        for rows, memory in zip(self.shape.sections, scratch["layers"], strict=True):
            source = weights_memory.at[seed, network, pl.ds(start, rows)]
            plgpu.copy_gmem_to_smem(source, memory, scratch["weights_ready"])
            start += rows
        number = jax.lax.div(self.tiles - block + self.blocks - 1, self.blocks)

        def fetch(turn, slot):
            load(block + turn * self.blocks, scratch["tile"].at[slot], scratch["ready"].at[slot])

        fetch(0, 0)
        plgpu.barrier_wait(scratch["weights_ready"])

        @pl.loop(0, number)
        def _(turn):
            slot = jax.lax.rem(turn, 2)
            if self.copies:
                pl.when(turn + 1 < number)(functools.partial(fetch, turn + 1, 1 - slot))
                plgpu.barrier_wait(scratch["ready"].at[slot])
            body(block + turn * self.blocks, scratch["tile"].at[slot])

    def prepare(self, tile, operand, scale=None) -> None:
        """Writes the operand of the products from a tile in float32; without a scale, gradients are 0."""
        ones = self.shape.ones
        x = plgpu.load(tile, layout=_ROWS, optimized=False)
        row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=_ROWS)
        gradients = 0.0 if scale is None else x * scale
        first = jnp.where(row == ones, 1.0, gradients)
        is_small = jnp.abs(x) < LARGEST_SMALL
        observed = 0.0 if self.shape.inputs is None else jnp.where(is_small, x * SMALL, 0.0)
        small = jnp.where(row <= ones, first, observed)
        operand[: self.shape.read] = small.astype(HALF)
        if self.shape.inputs is not None:
            big = jnp.where(is_small | (row <= ones), 0.0, x * BIG)
            operand[self.shape.read :] = big.astype(HALF)
        plgpu.commit_smem()

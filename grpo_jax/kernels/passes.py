"""The kernels of the forward and of the backward pass.

What a tile passes from layer to layer stays in registers in the forward kernel. The backward kernel computes hidden
layers again, and keeps the weights' gradients in registers over all tiles.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from grpo_jax.kernels.layout import BIG, HALF, LARGEST, LARGEST_SMALL, SAMPLES, SMALL, Shape, round_up

MULTIPROCESSORS = 132  # of an H100 and an H200
CHUNK = 32  # columns that element-wise code of the backward kernel takes at once
# Registers of a tile as it is read, [rows, 64]: 16 samples in each warp, four neighbours in each thread.
_ROWS = plgpu.Layout.TILED(
    plgpu.Tiling(((8, SAMPLES), (8, 16), (4,))), warp_dims=(-4,), lane_dims=(-3, -2), vector_dim=-1
)


def half_memory(*shape: int):
    """Shared memory in float16, in the order that tensor cores read."""
    return plgpu.SMEM(shape, HALF, transforms=(plgpu.TilingTransform((8, 16)), plgpu.SwizzleTransform(32)))


def product(shape: tuple[int, int], *pairs) -> jax.Array:
    """The sum of matrix products, float32; a left operand may be in registers."""

    def run(sums):
        for left, right in pairs:
            plgpu.wgmma(sums, left, right)
        return sums[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def activate(name: str, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """The activation and its derivative; None for the latter if it follows from the former."""
    if name == "tanh":
        return jnp.tanh(x), None
    if name == "relu":
        return jnp.maximum(x, 0.0), None
    root, cube = 2 * math.sqrt(2 / math.pi), 0.044715
    is_gelu = name == "gelu"
    inner, slope_of_inner = (root * (x + cube * x * x * x), root * (1.0 + 3 * cube * x * x)) if is_gelu else (x, 1.0)
    gate = 0.5 + 0.5 * jnp.tanh(0.5 * inner)
    return x * gate, gate * (1.0 + x * (1.0 - gate) * slope_of_inner)


class Launch:
    """A grid of (seeds, networks, blocks): a block is a warpgroup, which takes tiles in turns."""

    def __init__(self, shape: Shape, seeds: int, samples: int, resident: int, gradients: bool):
        """So many blocks are `resident` on a multiprocessor at once; with `gradients` they read those of outputs."""
        self.shape, self.networks, self.tiles = shape, len(shape.outputs), samples // SAMPLES
        self.copies = (shape.inputs is not None) + gradients  # that fill a tile
        self.blocks = min(self.tiles, max(1, MULTIPROCESSORS * resident // (seeds * self.networks)))
        self.grid = seeds, self.networks, self.blocks

    def kernel(self, body, *results: tuple[int, ...], **scratch):
        """The kernel `body(inputs, weights, ..., *results, **scratch)` for float32 results of these shapes."""
        shape = self.shape
        return plgpu.kernel(
            body,
            out_type=[jax.ShapeDtypeStruct(result, jnp.float32) for result in results],
            grid=self.grid,
            grid_names=("seed", "network", "block"),
            compiler_params=plgpu.CompilerParams(approx_math=True),
            scratch_types={
                "memory": half_memory(sum(shape.sections), shape.width),
                "tile": plgpu.SMEM((2, shape.read, SAMPLES), jnp.float32),
                "operand": half_memory(shape.rows, SAMPLES),
                "weights_ready": plgpu.Barrier(),
                "ready": plgpu.Barrier(num_arrivals=max(self.copies, 1), num_barriers=2),
                **scratch,
            },
        )


class Block:
    """A block in a kernel: its place in the grid, its weights, and the tile that it works at."""

    def __init__(self, launch: Launch, inputs, weights, scratch: dict, scales=None, gradients=()):
        self.launch, self.shape, self.inputs, self.gradients = launch, launch.shape, inputs, gradients
        self.seed, self.network, self.block = map(jax.lax.axis_index, ("seed", "network", "block"))
        self.scale = None if scales is None else scales[self.seed, self.network]
        self.weights, self.scratch, self.operand = weights, scratch, scratch["operand"]
        self.few = self.operand.at[pl.ds(0, self.shape.few)].T
        places = zip(itertools.accumulate(self.shape.sections, initial=0), self.shape.sections, strict=False)
        *self.first, self.head = [scratch["memory"].at[pl.ds(start, rows)] for start, rows in places]
        later = [self.first.pop() for _ in range(2 * (self.shape.depth - 1))][::-1]
        self.kernels, self.biases = later[::2], later[1::2]  # of the layers after the first

    def before(self, layer: int, rows, value, columns) -> jax.Array:
        """What the activation of a hidden layer is applied to: of some of its columns, from the layer before."""
        shape = (SAMPLES, columns.size)
        if layer > 0:
            bias, kernel = self.biases[layer - 1], self.kernels[layer - 1]
            return product(shape, (self.few, bias.at[:, columns]), (value, kernel.at[:, columns]))
        if self.first:
            return product(shape, (self.operand.T, self.first[0].at[:, columns]))
        source = self.inputs.at[self.seed, rows, self.network, columns]
        return plgpu.load(source, layout=plgpu.Layout.WGMMA, optimized=False)

    def run(self, compute) -> None:
        """Runs `compute(rows)` for each tile, with its operand in memory, and fetches the next tile meanwhile."""
        ready, weights_ready, blocks = self.scratch["ready"], self.scratch["weights_ready"], self.launch.blocks
        plgpu.copy_gmem_to_smem(self.weights.at[self.seed, self.network], self.scratch["memory"], weights_ready)
        number = jax.lax.div(self.launch.tiles - self.block + blocks - 1, blocks)

        def fetch(tile, slot):
            def copy(source, start, rows):  # rows that are not there become 0
                part = source.at[self.seed, pl.ds(0 * self.seed, rows), pl.ds(tile * SAMPLES, SAMPLES)]
                target = self.scratch["tile"].at[slot, pl.ds(start, rows)]
                plgpu.copy_gmem_to_smem(part, target, ready.at[slot])

            ones = self.shape.ones
            if self.first:
                copy(self.inputs, ones + 1, self.shape.read - ones - 1)
            for index, gradient in enumerate(self.gradients):
                pl.when(self.network == index)(functools.partial(copy, gradient, 0, ones))

        fetch(self.block, 0)
        plgpu.barrier_wait(weights_ready)

        @pl.loop(0, number)
        def _(turn):
            tile, slot = self.block + turn * blocks, jax.lax.rem(turn, 2)
            if self.launch.copies:
                pl.when(turn + 1 < number)(functools.partial(fetch, tile + blocks, 1 - slot))
                plgpu.barrier_wait(ready.at[slot])
            self._prepare(self.scratch["tile"].at[slot])
            compute(pl.ds(tile * SAMPLES, SAMPLES))

    def _prepare(self, tile) -> None:
        """Writes the operand of the products from a tile in float32; without a scale, gradients are 0."""
        x, ones, read = plgpu.load(tile, layout=_ROWS, optimized=False), self.shape.ones, self.shape.read
        row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=_ROWS)
        fixed = jnp.where(row == ones, 1.0, 0.0 if self.scale is None else x * self.scale)
        is_small = jnp.abs(x) < LARGEST_SMALL
        observed = jnp.where(is_small, x * SMALL, 0.0) if self.first else 0.0
        self.operand[:read] = jnp.where(row <= ones, fixed, observed).astype(HALF)
        if self.first:
            most = LARGEST / BIG if self.shape.activation == "tanh" else jnp.inf  # tanh is constant beyond it
            big = jnp.where(jnp.abs(x) > most, jnp.sign(x) * most, x) * BIG
            self.operand[read:] = jnp.where(is_small | (row <= ones), 0.0, big).astype(HALF)
        plgpu.commit_smem()


@functools.lru_cache(None)
def forward(shape: Shape, seeds: int, samples: int):
    """The kernel of (inputs, weights) for outputs, `[seeds, networks, samples, O rounded up]`.

    Inputs are observations `[seeds, D, samples]`, or `[seeds, samples, networks, width]` from XLA's first product.
    """
    launch = Launch(shape, seeds, samples, 5, gradients=False)
    columns = round_up(shape.ones, 8)

    def body(inputs, weights, out, **scratch):
        block = Block(launch, inputs, weights, scratch)

        def compute(rows):
            value = None
            for layer in range(shape.depth):
                before = block.before(layer, rows, value, pl.ds(0, shape.width))
                value = (activate(shape.activation, before)[0] * shape.stored).astype(HALF)
            result = product((SAMPLES, columns), (value, block.head.at[pl.ds(0, columns)].T))
            out[block.seed, block.network, rows] = result

        block.run(compute)

    return launch.kernel(body, (seeds, launch.networks, samples, columns))


@functools.lru_cache(None)
def backward(shape: Shape, seeds: int, samples: int):
    """The kernel of (inputs, weights, scales, *gradients of the outputs) for the gradients of weights, scaled.

    Gradients of outputs are `[seeds, O, samples]`, scales `[seeds, networks]`. Results are the sums of each block,
    `[seeds, networks, blocks, rows / 16, width, 16]`, and the gradients of inputs from XLA's first product.
    """
    launch = Launch(shape, seeds, samples, 3, gradients=True)
    own_slope, depth, width = shape.activation not in ("tanh", "relu"), shape.depth, shape.width
    chunks = [pl.ds(start, CHUNK) for start in range(0, width, CHUNK)]

    def body(inputs, weights, scales, *refs, values, slopes=None, **scratch):
        gradients, (out, *into_first) = refs[: launch.networks], refs[launch.networks :]
        block = Block(launch, inputs, weights, scratch, scales, gradients)
        values = [values.at[layer] for layer in range(depth)]
        slopes = [slopes.at[layer] for layer in range(depth)] if own_slope else values

        def add_up(*totals):
            *of_layers, of_head = totals

            def compute(rows):
                for layer in range(depth):
                    for at in chunks:
                        before = block.before(layer, rows, values[layer - 1], at)
                        value, derivative = activate(shape.activation, before)
                        values[layer][:, at] = (value * shape.stored).astype(HALF)
                        if own_slope:
                            slopes[layer][:, at] = derivative.astype(HALF)
                    plgpu.commit_smem()
                plgpu.wgmma(of_head, values[-1].T, block.few)
                remaining = list(of_layers)
                for layer in reversed(range(depth)):
                    for at in chunks:
                        if layer == depth - 1:
                            pair = block.few, block.head.at[:, at]
                        else:
                            pair = slopes[layer + 1], block.kernels[layer].at[at].T
                        gradient = product((SAMPLES, CHUNK), pair)
                        slope = plgpu.load(slopes[layer].at[:, at], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
                        if shape.activation == "tanh":
                            slope = 1.0 - slope * slope
                        elif shape.activation == "relu":
                            slope = jnp.where(slope > 0.0, 1.0, 0.0)
                        gradient *= shape.stored * slope
                        if layer == 0 and into_first:
                            into_first[0][block.seed, rows, block.network, at] = gradient
                        else:
                            slopes[layer][:, at] = gradient.astype(HALF)
                    plgpu.commit_smem()
                    if layer > 0:
                        plgpu.wgmma(remaining.pop(), slopes[layer].T, block.few)
                        plgpu.wgmma(remaining.pop(), slopes[layer].T, values[layer - 1])
                    elif block.first:
                        plgpu.wgmma(remaining.pop(), slopes[0].T, block.operand.T)
                plgpu.wgmma_wait(0)

            block.run(compute)
            return [each[...] for each in totals]

        totals = pl.run_scoped(add_up, *(plgpu.ACC((width, rows), jnp.float32) for rows in shape.sections))
        parts = [total[:, at : at + 16] for total in totals for at in range(0, total.shape[1], 16)]
        for index, part in enumerate(parts):
            out[block.seed, block.network, block.block, index] = part

    into_first = [(seeds, samples, launch.networks, width)] * (shape.inputs is None)
    sums = *launch.grid, sum(shape.sections) // 16, width, 16
    layers = half_memory(depth, SAMPLES, width)
    memory = {"values": layers, "slopes": layers} if own_slope else {"values": layers}
    return launch.kernel(body, sums, *into_first, **memory)

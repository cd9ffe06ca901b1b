"""The forward kernel: what a tile passes from layer to layer stays in registers."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from grpo_jax.kernels.layout import HALF, SAMPLES, Shape, round_up
from grpo_jax.kernels.tiles import Launch, activate, product, turned

RESIDENT = 5


@functools.lru_cache(None)
def make(shape: Shape, seeds: int, samples: int):
    """The kernel of (inputs, weights) -> outputs `[seeds, networks, samples, O rounded up]`; `samples` is n * 64.

    Inputs are observations `[seeds, D, samples]`, or, if XLA computes the first layer, what its activation is applied
    to, `[seeds, samples, networks, width]`.
    """
    launch = Launch(shape, seeds, samples, RESIDENT, copies=0 if shape.inputs is None else 1)
    columns = round_up(shape.ones, 8)

    def body(inputs, weights, out, **scratch):
        seed, network = jax.lax.axis_index("seed"), jax.lax.axis_index("network")
        operand, parts = scratch["operand"], scratch["layers"]
        few = turned(operand.at[pl.ds(0, shape.few)])

        def compute(tile, memory):
            launch.prepare(memory, operand)
            if shape.inputs is None:
                x, *later = None, *parts
                rows = inputs.at[seed, pl.ds(tile * SAMPLES, SAMPLES), network]
                before = plgpu.load(rows, layout=plgpu.Layout.WGMMA, optimized=False)
            else:
                x, *later = parts
                before = product((SAMPLES, shape.width), (turned(operand), x))
            for kernel, bias in zip(later[:-1:2], later[1::2], strict=True):
                value = (activate(shape.activation, before)[0] * shape.stored).astype(HALF)
                before = product((SAMPLES, shape.width), (few, bias), (value, kernel))
            value = (activate(shape.activation, before)[0] * shape.stored).astype(HALF)
            result = product((SAMPLES, columns), (value, turned(later[-1].at[pl.ds(0, columns)])))
            out[seed, network, pl.ds(tile * SAMPLES, SAMPLES)] = result

        launch.run(inputs, weights, (), scratch, compute)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((seeds, launch.networks, samples, columns), jnp.float32),
        scratch_types=launch.scratch,
        **launch.grid,
    )

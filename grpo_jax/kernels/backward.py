"""The backward kernel: computes hidden layers again, and keeps the weights' gradients in registers over all tiles."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from grpo_jax.kernels.layout import HALF, SAMPLES, Shape
from grpo_jax.kernels.tiles import Launch, activate, half_memory, product, slope, turned


@functools.lru_cache(None)
def make(shape: Shape, part: int, seeds: int, samples: int):
    """The kernel of (inputs, weights, scales, *gradients of the outputs) for the sums of one of `Shape.parts`.

    Inputs and `samples` are as for the forward kernel, gradients `[seeds, O, samples]`, scales `[seeds, networks]`.

    Returns:
      The sums of each block, `[seeds, networks, blocks, columns / 16, width, 16]`, and, of the first part and if XLA
      computes the first layer, scaled gradients with respect to its results, `[seeds, samples, networks, width]`.
    """
    launch = Launch(shape, seeds, samples, 3 if shape.width == 64 else 2, copies=1 if shape.inputs is None else 2)
    sums = shape.parts[part]
    own_slope, depth, width = shape.activation not in ("tanh", "relu"), shape.depth, shape.width
    gives_first = shape.inputs is None and part == 0
    lowest = 0 if gives_first else min(layer for _, layer, _ in sums)
    chunk = 32 if width == 64 else 64  # columns that element-wise code takes at once
    chunks = [pl.ds(start, chunk) for start in range(0, width, chunk)]
    tall = (SAMPLES, chunk)

    def body(inputs, weights, scales, *refs, values, slopes, **scratch):
        gradients, (out, *into_first) = refs[: launch.networks], refs[launch.networks :]
        seed, network, block = map(jax.lax.axis_index, ("seed", "network", "block"))
        operand, parts = scratch["operand"], scratch["layers"]
        few = operand.at[pl.ds(0, shape.few)]
        first, later = (None, parts) if shape.inputs is None else (parts[0], parts[1:])
        kernels, biases, head = later[:-1:2], later[1::2], later[-1]
        values = [values.at[layer] for layer in range(depth)]
        slopes = [slopes.at[layer] for layer in range(depth)] if own_slope else values
        scale = scales[seed, network]

        def compute(accumulators, tile, memory):
            launch.prepare(memory, operand, scale)
            rows = pl.ds(tile * SAMPLES, SAMPLES)
            for layer in range(depth):
                for at in chunks:
                    if layer > 0:
                        bias, kernel = biases[layer - 1].at[:, at], kernels[layer - 1].at[:, at]
                        before = product(tall, (turned(few), bias), (values[layer - 1], kernel))
                    elif first is not None:
                        before = product(tall, (turned(operand), first.at[:, at]))
                    else:
                        source = inputs.at[seed, rows, network, at]
                        before = plgpu.load(source, layout=plgpu.Layout.WGMMA, optimized=False)
                    value, derivative = activate(shape.activation, before)
                    values[layer][:, at] = (value * shape.stored).astype(HALF)
                    if own_slope:
                        slopes[layer][:, at] = derivative.astype(HALF)
                plgpu.commit_smem()
            for layer in range(depth - 1, lowest - 1, -1):
                if layer == depth - 1 and ("head", layer) in accumulators:
                    plgpu.wgmma(accumulators["head", layer], turned(values[layer]), turned(few))
                for at in chunks:
                    if layer == depth - 1:
                        gradient = product(tall, (turned(few), head.at[:, at]))
                    else:
                        gradient = product(tall, (slopes[layer + 1], turned(kernels[layer].at[at])))
                    old = plgpu.load(slopes[layer].at[:, at], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
                    gradient *= shape.stored * (old if own_slope else slope(shape.activation, old))
                    if layer == 0 and first is None:
                        into_first[0][seed, rows, network, at] = gradient
                    else:
                        slopes[layer][:, at] = gradient.astype(HALF)
                plgpu.commit_smem()
                pairs = {"bias": few, "first": operand}
                for (name, of), accumulator in accumulators.items():
                    if of == layer and name == "kernel":
                        plgpu.wgmma(accumulator, turned(values[layer - 1]), slopes[layer])
                    elif of == layer and name in pairs:
                        plgpu.wgmma(accumulator, turned(slopes[layer]), turned(pairs[name]))
            plgpu.wgmma_wait(0)

        def run(*accumulators):
            named = {(name, layer): each for (name, layer, _), each in zip(sums, accumulators, strict=True)}
            launch.run(inputs, weights, gradients, scratch, functools.partial(compute, named))
            return tuple(each[...] for each in accumulators)

        totals = pl.run_scoped(run, *(plgpu.ACC((width, columns), jnp.float32) for _, _, columns in sums))
        pieces = [total[:, at : at + 16] for total in totals for at in range(0, total.shape[1], 16)]
        for index, piece in enumerate(pieces):
            out[seed, network, block, index] = piece

    num_pieces = sum(columns for *_, columns in sums) // 16
    out_type = [jax.ShapeDtypeStruct((seeds, launch.networks, launch.blocks, num_pieces, width, 16), jnp.float32)]
    if gives_first:
        out_type.append(jax.ShapeDtypeStruct((seeds, samples, launch.networks, width), jnp.float32))
    layers = half_memory(depth, SAMPLES, width)
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=launch.scratch | {"values": layers, "slopes": layers if own_slope else half_memory(1, 8, 16)},
        **launch.grid,
    )

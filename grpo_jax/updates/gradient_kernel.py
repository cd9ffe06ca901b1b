"""Loss, metrics and gradient of a minibatch in one kernel: the activations of the network never leave the chip.

A program of the kernel takes `BLOCK` samples at a time. It runs the loss of `updates.loss` and its gradient on them,
traced and replayed on tiles. Any algorithm with elementwise slots and any policy of small dense layers is therefore
served without code of its own.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from grpo_jax.algorithms import Algorithm
from grpo_jax.devices.kernels import Rows, Vector, check_one_device, launch
from grpo_jax.devices.tile_operations import tile_shape
from grpo_jax.devices.tiles import Traced
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.policies import Policy
from grpo_jax.types import Batch, Metrics, PyTree
from grpo_jax.updates.loss import RATIO_MAX, loss
from grpo_jax.updates.minibatches import Minibatch

BLOCK = 32
"""Samples that a program processes at a time."""
NUM_WARPS = 8
"""Groups of 32 threads in a program."""
MAX_WEIGHTS = 128 * 128
"""The most weights of a layer: each program keeps their gradient in registers."""
MAX_PROGRAMS = 128
"""The most programs, each of which writes a partial gradient. An H100 runs 132 at a time."""


def make_kernel_gradient(
    algorithm: Algorithm, policy: Policy, batch: Batch, hyperparams: Hyperparams
) -> Callable[[PyTree, Minibatch], tuple[jax.Array, Metrics, PyTree]]:
    """`gradient(params, minibatch) -> loss, metrics, gradient`, as `minibatches.make_gradient` has it, up to rounding.

    Args:
      algorithm, policy: the loss.
      batch: single steps, `[1, N]`, from which the kernel takes the samples of the minibatch by itself.
      hyperparams: every coefficient.

    Raises:
      ConfigError: the mesh splits environments or policies over devices.
      NotOnTiles: a slot or the policy has an operation that kernels lack.
      ValueError: samples of the batch are compared with each other, or a layer is too wide.
    """
    check_one_device("gradient_kernel")
    if batch.whole.sequences or batch.whole.minibatches:
        raise ValueError("a block of the kernel has single steps, but the update compares or carries over several")
    samples = batch._replace(advantage=None, mask=None, weight=None)
    leaves = jax.tree.leaves(samples)
    traced = _trace(algorithm, policy, hyperparams, batch)
    largest = max(leaf.size for leaf in jax.tree.leaves(traced.results))
    if largest > MAX_WEIGHTS:
        raise ValueError(f"a layer of {largest} weights is more than fits into registers, {MAX_WEIGHTS}")
    params_used, num_valid_used, samples_used, _ = map(jax.tree.leaves, traced.uses_argument)
    packed = Rows(leaves, samples_used)
    rows = packed.pack(leaves)  # once for all minibatches

    def gradient(params, minibatch):
        shared = [*traced.captured, *jax.tree.leaves(params), minibatch.num_valid]
        used = [True] * len(traced.captured) + params_used + num_valid_used
        own = [leaf.reshape(1, -1) for leaf in (minibatch.advantage, minibatch.mask, minibatch.weight)]
        layouts = Layouts(Vector(shared, used), packed, Rows(own), Vector(jax.tree.leaves(traced.results)))
        num_shuffled = batch.whole.blocks
        first = jnp.arange(num_shuffled) * (batch.mask.shape[1] // num_shuffled)  # of each block that is shuffled apart
        indices = (minibatch.indices + first[:, None]).reshape(-1)
        indices, own, num_programs, num_blocks = _filled_blocks(indices, own)
        partial = launch(
            functools.partial(_gradient_kernel, traced, layouts, num_blocks),
            jax.ShapeDtypeStruct((num_programs, layouts.results.size), jnp.float32),
            *(layouts.shared.pack(shared), rows, indices, layouts.own.pack(own)),
            num_programs=num_programs,
            num_warps=NUM_WARPS,
            name="gradient_kernel",
        )
        results = jax.tree.structure(traced.results)
        (total, metrics, gradient), _ = results.unflatten(layouts.results.unpack(jnp.sum(partial, axis=0)))
        return total, metrics | {RATIO_MAX: jnp.max(partial[:, -1])}, gradient

    return gradient


class Layouts(NamedTuple):
    """How the arguments and the results of the kernel lie in memory."""

    shared: Vector  # captured arrays such as hyperparameters, parameters, number of valid samples
    samples: Rows  # of the whole batch
    own: Rows  # of the minibatch: advantage, mask, weight
    results: Vector  # loss, metrics, gradient, largest ratio


def _filled_blocks(indices, own):
    """Indices and arrays with samples of weight 0 at the end, the number of programs, and of blocks in each."""
    num_blocks = -(-indices.shape[0] // BLOCK)
    blocks_per_program = -(-num_blocks // MAX_PROGRAMS)
    num_programs = -(-num_blocks // blocks_per_program)
    missing = num_programs * blocks_per_program * BLOCK - indices.shape[0]
    own = [jnp.pad(leaf, ((0, 0), (0, missing))) for leaf in own]
    # A sample of the minibatch itself: even with weight 0, one with NaN from elsewhere would make the gradient NaN.
    return jnp.pad(indices, (0, missing), mode="edge"), own, num_programs, blocks_per_program


def _gradient_kernel(traced, layouts, num_blocks, shared_ref, samples_ref, indices_ref, own_ref, results_ref):
    """One program: the results of its blocks, summed, or maximised, into its row."""
    program = pl.program_id(0)

    def add_block(i, totals):
        here = (program * num_blocks + i) * BLOCK + jnp.arange(BLOCK)
        shared = layouts.shared.load(shared_ref)  # again for each block: registers are for the activations
        samples = layouts.samples.load(samples_ref, indices_ref[here])
        sums, maximum = traced.on_tiles(*shared, *samples, *layouts.own.load(own_ref, here))
        return jax.tree.map(jnp.add, totals[0], sums), jnp.maximum(totals[1], maximum)

    zeros = jax.tree.map(lambda leaf: jnp.zeros(tile_shape(leaf.shape), leaf.dtype), traced.results)
    totals = jax.lax.fori_loop(0, num_blocks, add_block, zeros)
    layouts.results.store(results_ref, program, jax.tree.leaves(totals))


def _trace(algorithm, policy, hyperparams, batch) -> Traced:
    """The gradient of one block, traced: the sums (loss, metrics, gradient), and the maximum `RATIO_MAX`."""

    def gradient(params, num_valid, samples, own):
        advantage, mask, weight = own
        samples = samples._replace(advantage=advantage, mask=mask, weight=weight)
        (total, metrics), gradient = jax.value_and_grad(loss, argnums=2, has_aux=True)(
            algorithm, policy, params, samples, mask / jnp.maximum(num_valid, 1.0), hyperparams
        )
        maximum = metrics.pop(RATIO_MAX)
        return (total, metrics, gradient), maximum

    def block(leaf):
        return jax.ShapeDtypeStruct((1, BLOCK, *leaf.shape[2:]), leaf.dtype)

    number = jax.ShapeDtypeStruct((), jnp.float32)
    params = jax.eval_shape(policy.init, jax.random.key(0))
    samples, own = batch._replace(advantage=None, mask=None, weight=None), (batch.advantage, batch.mask, batch.weight)
    return Traced(gradient, params, number, *jax.tree.map(block, (samples, own)))

"""Loss, metrics and gradient of a minibatch in one kernel: the activations of the network never leave the chip.

A program of the kernel takes `BLOCK` samples at a time. It runs the loss of `updates.loss` and its gradient on them,
traced and replayed on tiles. Any algorithm with elementwise slots and any policy of small dense layers is therefore
served without code of its own.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from grpo_jax.algorithms import Algorithm
from grpo_jax.devices.kernels import Rows, Vector, launch
from grpo_jax.devices.tiles import Traced, tile_shape
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.policies import Policy
from grpo_jax.types import Batch, Metrics, PyTree
from grpo_jax.updates.loss import RATIO_MAX, loss

BLOCK = 32
"""Samples that a program processes at a time."""
NUM_WARPS = 8
MAX_PROGRAMS = 128
"""The most programs, each of which writes a partial gradient. An H100 runs 132 at a time."""


def kernel_gradient(
    algorithm: Algorithm,
    policy: Policy,
    params: PyTree,
    batch: Batch,
    indices: jax.Array,
    prepared: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    hyperparams: Hyperparams,
) -> tuple[jax.Array, Metrics, PyTree]:
    """Loss, metrics and gradient over the samples at `indices`: the same as `jax.value_and_grad(loss)` of them.

    Args:
      algorithm, policy, params: the loss, and the parameters to differentiate.
      batch: single steps, `[1, N]`, from which the kernel itself takes the samples.
      indices: `[n]`, the samples of the minibatch.
      prepared: advantage, mask, weight, and weight in the metrics of these samples, each `[1, n]`.
      hyperparams: every coefficient.

    Raises:
      NotOnTiles: a slot or the policy has an operation that kernels lack.
    """
    num_blocks = -(-indices.shape[0] // BLOCK)
    blocks_per_program = -(-num_blocks // MAX_PROGRAMS)
    num_programs = -(-num_blocks // blocks_per_program)
    # The samples that fill up the last blocks have weight 0 and are not valid.
    missing = num_programs * blocks_per_program * BLOCK - indices.shape[0]
    indices = jnp.pad(indices, (0, missing))
    prepared = [jnp.pad(leaf, ((0, 0), (0, missing))) for leaf in prepared]

    samples = batch._replace(advantage=None, mask=None, weight=None)
    block_gradient = _trace(algorithm, policy, params, hyperparams, samples, prepared)
    shared = [*block_gradient.captured, *jax.tree.leaves((params, hyperparams))]
    used = jax.tree.leaves(block_gradient.uses_argument)
    used = [True] * len(block_gradient.captured) + used
    num_gathered = len(jax.tree.leaves(samples))
    shared_layout = Vector(shared, used[: len(shared)])
    sample_layout = Rows(jax.tree.leaves(samples), used[len(shared) : len(shared) + num_gathered])
    prepared_layout = Rows(prepared)
    sums, maximum = block_gradient.results
    results = Vector([*jax.tree.leaves(sums), maximum])

    def gradient_kernel(shared_ref, samples_ref, indices_ref, prepared_ref, out_ref):
        program = pl.program_id(0)

        def add_block(i, totals):
            here = (program * blocks_per_program + i) * BLOCK + jnp.arange(BLOCK)
            shared = shared_layout.load(shared_ref)  # again for each block: registers are for the activations
            samples = sample_layout.load(samples_ref, indices_ref[here])
            sums, maximum = block_gradient.on_tiles(*shared, *samples, *prepared_layout.load(prepared_ref, here))
            return jax.tree.map(jnp.add, totals[0], sums), jnp.maximum(totals[1], maximum)

        zeros = jax.tree.map(lambda leaf: jnp.zeros(tile_shape(leaf.shape), leaf.dtype), block_gradient.results)
        totals = jax.lax.fori_loop(0, blocks_per_program, add_block, zeros)
        results.store(out_ref, program, jax.tree.leaves(totals))

    partial = launch(
        gradient_kernel,
        jax.ShapeDtypeStruct((num_programs, results.size + 1), jnp.float32),
        shared_layout.pack(shared),
        sample_layout.pack(jax.tree.leaves(samples)),
        indices,
        prepared_layout.pack(prepared),
        num_programs=num_programs,
        num_warps=NUM_WARPS,
    )
    total = jnp.sum(partial, axis=0)
    total, metrics, gradient = jax.tree.unflatten(jax.tree.structure(sums), results.unpack(total)[:-1])
    return total, metrics | {RATIO_MAX: jnp.max(partial[:, results.starts[-1]])}, gradient


def _trace(algorithm, policy, params, hyperparams, samples, prepared) -> Traced:
    """The gradient of one block, traced: the sums (loss, metrics, gradient), and the maximum `RATIO_MAX`."""

    def gradient(params, hyperparams, samples, prepared):
        advantage, mask, weight, per_step = prepared
        samples = samples._replace(advantage=advantage, mask=mask, weight=weight)
        (total, metrics), gradient = jax.value_and_grad(loss, argnums=2, has_aux=True)(
            algorithm, policy, params, samples, per_step, hyperparams
        )
        maximum = metrics.pop(RATIO_MAX)
        return (total, metrics, gradient), maximum

    def block(leaf):
        return jax.ShapeDtypeStruct((1, BLOCK, *leaf.shape[2:]), leaf.dtype)

    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.float32), (params, hyperparams))
    return Traced(gradient, *shapes, *jax.tree.map(block, (samples, prepared)))

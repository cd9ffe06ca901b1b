"""The gradient of a minibatch, accumulated over parts of it."""

import jax
import jax.numpy as jnp

from grpo_jax.algorithms import Algorithm
from grpo_jax.devices.mesh import along_envs
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.objectives.reductions import mean_over_steps
from grpo_jax.policies import Policy
from grpo_jax.types import Batch, Metrics, PyTree, Whole
from grpo_jax.updates.gathering import make_gather
from grpo_jax.updates.loss import RATIO_MAX, loss


def default_microbatches(whole: Whole, num_steps: int, num_sequences: int) -> int:
    """The number of parts of a minibatch `[num_steps, num_sequences]`, so that one part fits into a cache or memory.

    A part is for a CPU core's cache, or for an accelerator's memory. It has whole sequences, and whole groups of
    `whole.members`; eight sequences or more if there are as many, as a recurrent layer goes through a part step by step
    and narrower steps would waste vector units.
    """
    if whole.minibatches:
        return 1
    most = max(8, (512 if jax.default_backend() == "cpu" else 65_536) // num_steps)
    num_units = num_sequences // whole.members
    fewest = min(-(-num_sequences // most), num_units)
    return next((n for n in range(fewest, 4 * fewest) if num_units % n == 0), 1)


def minibatch_gradient(
    algorithm: Algorithm,
    policy: Policy,
    params: PyTree,
    batch: Batch,
    indices: jax.Array,
    hyperparams: Hyperparams,
    num_microbatches: int | None = None,
) -> tuple[jax.Array, Metrics, PyTree]:
    """Loss, metrics and gradient over the samples at `indices`, accumulated over parts of equal size.

    The parts bound the memory of the backward pass; up to rounding, their sum is the gradient of the whole. Valid
    samples come first in `indices`, and parts without any are skipped: steps after the end of a one-episode member cost
    nothing. Without `num_microbatches` it is chosen by size (`default_microbatches`).
    """
    members = batch.whole.members
    if num_microbatches is None:
        num_microbatches = default_microbatches(batch.whole, batch.mask.shape[0], indices.shape[0])
    advantage, mask, weight = make_gather((batch.advantage, batch.mask, batch.weight))(indices)
    if algorithm.normalize is not None:
        advantage = algorithm.normalize(advantage, mask)
    weight *= batch.mask.shape[1] / indices.shape[0]
    per_step = mean_over_steps(mask)

    size = indices.shape[0] // num_microbatches
    # The same for all minibatches, so compilers move it out of the loops over them.
    take = make_gather(batch._replace(carry=None, advantage=None, mask=None, weight=None))

    def part(i):
        here, advantage_here, mask_here, weight_here, per_step_here = (
            jax.lax.dynamic_slice_in_dim(leaf, i * size, size, axis=-1)
            for leaf in (indices, advantage, mask, weight, per_step)
        )
        carry = jax.tree.map(lambda leaf: jnp.take(leaf, here[::members] // members, axis=1), batch.carry)
        samples = take(here)._replace(advantage=advantage_here, mask=mask_here, weight=weight_here, carry=carry)
        samples = along_envs(samples, axis=1)
        samples = jax.lax.optimization_barrier(samples)  # or XLA repeats the gather wherever a sample is used
        (total, metrics), gradient = jax.value_and_grad(loss, argnums=2, has_aux=True)(
            algorithm, policy, params, samples, per_step_here, hyperparams
        )
        return total, metrics, gradient

    def accumulate(i, sums):
        (total, metrics, gradient), new = sums, part(i)
        ratio_max = jnp.maximum(metrics[RATIO_MAX], new[1][RATIO_MAX])
        total, metrics, gradient = jax.tree.map(jnp.add, (total, metrics, gradient), new)
        return total, metrics | {RATIO_MAX: ratio_max}, gradient

    if num_microbatches == 1:
        return part(0)
    # Neighbours that share a carry stay together, and those with a valid sample come first.
    num_valid = members * jnp.sum(jnp.any(mask.reshape(mask.shape[0], -1, members), axis=(0, 2)))
    num_parts = (num_valid + size - 1) // size
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(part, 0))
    return jax.lax.fori_loop(0, num_parts, accumulate, zeros)

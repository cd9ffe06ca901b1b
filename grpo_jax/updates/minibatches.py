"""Minibatches, and the gradient of one, accumulated over parts of it."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from grpo_jax.config import Config
from grpo_jax.devices.mesh import along_envs
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.objectives.slots import bound
from grpo_jax.policies import Policy
from grpo_jax.types import Batch, Metrics, PyTree
from grpo_jax.updates.loss import RATIO_MAX, loss


class Minibatch(NamedTuple):
    """The samples of a gradient step by index, and what depends on all of them: `n` from each of `K` blocks."""

    indices: jax.Array  # [K, n] of sequences within their block; those with a valid sample come first
    advantage: jax.Array  # [S, K, n], normalised over the minibatch
    mask: jax.Array  # [S, K, n] bool
    weight: jax.Array  # [S, K, n], which sums to the weight of the whole batch
    num_valid: jax.Array  # number of valid samples, float


@struct.dataclass
class StackedMetrics:
    """Metrics by name in one array, which a device adds and writes at once."""

    values: jax.Array  # [..., M] float
    names: tuple[str, ...] = struct.field(pytree_node=False)

    @classmethod
    def stack(cls, metrics: Metrics) -> "StackedMetrics":
        """One array of these scalars."""
        return cls(jnp.stack([value.astype(float) for value in metrics.values()]), tuple(metrics))

    def as_dict(self) -> Metrics:
        """Each array `[...]` by its name."""
        return dict(zip(self.names, jnp.moveaxis(self.values, -1, 0), strict=True))


def _take(tree: PyTree, indices: jax.Array) -> PyTree:
    """The samples at `indices [K, n]` within each of `K` equal blocks: each leaf `[S, N, ...]` as `[S, K * n, ...]`."""

    def rows(leaf, indices):
        return jnp.asarray(leaf).at[:, indices].get(mode="promise_in_bounds", wrap_negative_indices=False)

    def take(leaf):
        if len(indices) == 1:  # the mapped gather below takes twice the memory on a TPU
            return rows(leaf, indices[0])
        # Mapped over the blocks: a partitioner then knows that each block's samples stay on its device.
        blocks = leaf.reshape(leaf.shape[0], len(indices), -1, *leaf.shape[2:])
        return jax.vmap(rows, (1, 0), 1)(blocks, indices).reshape(leaf.shape[0], -1, *leaf.shape[2:])

    return jax.tree.map(take, tree)


def make_minibatch(config: Config, batch: Batch, hyperparams: Hyperparams, indices: jax.Array) -> Minibatch:
    """The minibatch of an update.

    Args:
      config: the slot `normalize` of its algorithm is called.
      batch: `[S, N]`.
      hyperparams: every coefficient.
      indices: `[K, n]` of its sequences, within each of the `K` blocks of the batch.
    """
    # The barrier stops XLA from gathering again for each of the sums that a normalisation needs.
    samples = jax.lax.optimization_barrier(_take((batch.advantage, batch.mask, batch.weight), indices))
    advantage, mask, weight = samples
    if config.algorithm.normalize is not None:
        advantage = bound(config.algorithm.normalize, hyperparams)(advantage, mask)
    weight *= batch.mask.shape[1] / indices.size
    by_block = (leaf.reshape(-1, *indices.shape) for leaf in (advantage, mask, weight))
    return Minibatch(indices, *by_block, num_valid=jnp.sum(mask.astype(float)))


def default_microbatches(config: Config, num_steps: int, num_sequences: int) -> int:
    """The number of parts of a minibatch `[num_steps, num_sequences]`, so that one part fits into a cache or memory.

    A part is for a CPU core's cache, or for an accelerator's memory. It has whole sequences, and whole groups where
    these stay together; eight sequences or more if there are as many, as a recurrent layer goes through a part step by
    step and narrower steps would waste vector units.
    """
    if config.algorithm.whole_minibatches:
        return 1
    most = max(8, config.plan.samples_per_part // num_steps)
    num_units = num_sequences // config.members_together
    fewest = min(-(-num_sequences // most), num_units)
    fewer = max(n for n in range(1, fewest + 1) if num_units % n == 0)
    return next((n for n in range(fewest, 4 * fewest) if num_units % n == 0), fewer)


def make_gradient(
    config: Config,
    policy: Policy,
    batch: Batch,
    hyperparams: Hyperparams,
    flatten: Callable[[PyTree], PyTree] = lambda gradient: gradient,
) -> Callable[[PyTree, Minibatch], tuple[StackedMetrics, PyTree]]:
    """`gradient(params, minibatch) -> metrics with "loss", gradient`, accumulated over parts of equal size.

    The parts bound the memory of the backward pass; up to rounding, their sum is the gradient of the whole. Without
    `num_microbatches` it is chosen by size (`default_microbatches`). Valid samples come first, so a plan may skip the
    parts without any: steps after the end of a one-episode member then cost nothing. `flatten` may make one vector of
    the gradient.
    """
    num_blocks, sharing = config.shuffle_blocks, config.members_per_carry
    batch = jax.lax.stop_gradient(batch.replace(advantage=None, mask=None, weight=None))

    @functools.partial(jax.jit, inline=True)  # traced once for its shapes and for the loop over parts
    def part(params, minibatch):
        advantage, mask, weight = (leaf.reshape(leaf.shape[0], -1) for leaf in minibatch[1:4])
        samples = _take(batch.replace(carry=None), minibatch.indices)
        carry = _take(batch.carry, minibatch.indices[:, ::sharing] // sharing)
        samples = along_envs(samples.replace(carry=carry), axis=1)
        samples = jax.lax.optimization_barrier(samples)  # or XLA repeats the gather wherever a sample is used
        samples = samples.replace(**along_envs({"advantage": advantage, "mask": mask, "weight": weight}, axis=1))
        per_step = mask.astype(float) / jnp.maximum(minibatch.num_valid, 1.0)
        (total, metrics), gradient = jax.value_and_grad(loss, argnums=2, has_aux=True)(
            config, policy, params, samples, per_step, hyperparams
        )
        return StackedMetrics.stack(metrics | {"loss": total}), flatten(gradient)

    def gradient(params, minibatch):
        num_steps, _, num_sequences = minibatch.mask.shape
        num_parts = config.num_microbatches
        if num_parts is None:
            num_parts = default_microbatches(config, num_steps * num_blocks, num_sequences)
        if num_parts == 1:
            return part(params, minibatch)
        size = num_sequences // num_parts

        def accumulate(i, sums):
            here = [jax.lax.dynamic_slice_in_dim(leaf, i * size, size, axis=-1) for leaf in minibatch[:-1]]
            new = part(params, Minibatch(*here, minibatch.num_valid))
            metrics, gradient = jax.tree.map(jnp.add, sums, new)
            is_max = np.array([name == RATIO_MAX for name in metrics.names])
            largest = jnp.maximum(sums[0].values, new[0].values)
            return metrics.replace(values=jnp.where(is_max, largest, metrics.values)), gradient

        if config.plan.skips_empty_parts:
            # Neighbours stay together, and those with a valid sample come first in each block.
            members = config.members_together
            filled = jnp.any(minibatch.mask.reshape(num_steps, num_blocks, -1, members), axis=(0, 3))
            num_filled = members * jnp.max(jnp.sum(filled, axis=1))
            num_parts = (num_filled + size - 1) // size
        first = Minibatch(*(leaf[..., :size] for leaf in minibatch[:-1]), minibatch.num_valid)
        shapes = jax.eval_shape(part, params, first)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return jax.lax.fori_loop(0, num_parts, accumulate, zeros)

    return gradient

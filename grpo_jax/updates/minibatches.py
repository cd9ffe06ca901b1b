"""Minibatches, and the gradient of one, accumulated over parts of it."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import broadcast_to_rank

from grpo_jax.config import Config
from grpo_jax.devices.mesh import along_envs
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.objectives.slots import bound
from grpo_jax.policies import Policy
from grpo_jax.types import Batch, Metrics, PyTree
from grpo_jax.updates.gathering import make_gather
from grpo_jax.updates.loss import RATIO_MAX, loss
from grpo_jax.updates.shuffle import shuffled_order


class Minibatch(NamedTuple):
    """The samples of a gradient step by index, and what depends on all of them: `n` from each of `K` blocks."""

    indices: jax.Array  # [K, n] of sequences within their block; those with a valid sample come first
    advantage: jax.Array  # [S, K, n], normalised over the minibatch
    mask: jax.Array  # [S, K, n] bool
    weight: jax.Array  # [S, K, n], which sums to the weight of the whole batch
    num_valid: jax.Array  # number of valid samples, float


def minibatch_order(config: Config, key: jax.Array, mask: jax.Array) -> jax.Array:
    """`[num_minibatches, K, n]`: the sequences of a batch, dealt out in random order, `n` of each of its `K` blocks.

    Args:
      config: the number of minibatches and of blocks, and of neighbouring members that stay together.
      key: of the order.
      mask: `[S, N]` bool; sequences with a valid sample are dealt out first, and evenly.
    """
    num_blocks, members, num_minibatches = config.shuffle_blocks, config.members_per_carry, config.num_minibatches
    filled = jnp.any(mask.reshape(mask.shape[0], num_blocks, -1, members), axis=(0, 3))
    keys = jax.random.split(key, num_blocks) if num_blocks > 1 else key[None]
    units = jax.vmap(shuffled_order)(keys, filled)
    places = broadcast_to_rank(jnp.arange(members), 4)
    sequences = units.reshape(num_blocks, -1, num_minibatches, 1) * members + places
    return jnp.moveaxis(sequences, 2, 0).reshape(num_minibatches, num_blocks, -1)


def make_minibatches(config: Config, batch: Batch, orders: jax.Array, hyperparams: Hyperparams) -> Minibatch:
    """The minibatches of all updates at once.

    Args:
      config: the slot `normalize` of its algorithm is called for each minibatch.
      batch: `[S, N]`.
      orders: `[U, K, n]` indices of the sequences of each minibatch, within each of the `K` blocks of the batch.
      hyperparams: every coefficient.

    Returns:
      Each leaf `[U, ...]`.
    """
    take = make_gather((batch.advantage, batch.mask, batch.weight), config.shuffle_blocks)

    def make(indices):
        # The barrier stops XLA from gathering again for each of the sums that a normalisation needs.
        advantage, mask, weight = jax.lax.optimization_barrier(take(indices))
        if config.algorithm.normalize is not None:
            advantage = bound(config.algorithm.normalize, hyperparams)(advantage, mask)
        weight *= batch.mask.shape[1] / indices.size
        by_block = (leaf.reshape(-1, *indices.shape) for leaf in (advantage, mask, weight))
        return Minibatch(indices, *by_block, num_valid=jnp.sum(mask.astype(float)))

    return jax.vmap(make)(orders)


def default_microbatches(config: Config, num_steps: int, num_sequences: int) -> int:
    """The number of parts of a minibatch `[num_steps, num_sequences]`, so that one part fits into a cache or memory.

    A part is for a CPU core's cache, or for an accelerator's memory. It has whole sequences, and whole groups where
    these share a carry; eight sequences or more if there are as many, as a recurrent layer goes through a part step by
    step and narrower steps would waste vector units.
    """
    if config.algorithm.whole_minibatches:
        return 1
    most = max(8, config.plan.samples_per_part // num_steps)
    num_units = num_sequences // config.members_per_carry
    fewest = min(-(-num_sequences // most), num_units)
    return next((n for n in range(fewest, 4 * fewest) if num_units % n == 0), 1)


def minibatch_gradient(
    config: Config, policy: Policy, params: PyTree, batch: Batch, indices: jax.Array, hyperparams: Hyperparams
) -> tuple[jax.Array, Metrics, PyTree]:
    """Loss, metrics and gradient over the samples at `indices`, `[n]` or `[K, n]`: see `make_gradient`."""
    minibatches = make_minibatches(config, batch, indices.reshape(1, config.shuffle_blocks, -1), hyperparams)
    minibatch = jax.tree.map(lambda leaf: leaf[0], minibatches)
    return make_gradient(config, policy, batch, hyperparams)(params, minibatch)


def make_gradient(
    config: Config, policy: Policy, batch: Batch, hyperparams: Hyperparams
) -> Callable[[PyTree, Minibatch], tuple[jax.Array, Metrics, PyTree]]:
    """`gradient(params, minibatch) -> loss, metrics, gradient`, accumulated over parts of equal size.

    The parts bound the memory of the backward pass; up to rounding, their sum is the gradient of the whole. Without
    `num_microbatches` it is chosen by size (`default_microbatches`). Valid samples come first, so a plan may skip the
    parts without any: steps after the end of a one-episode member then cost nothing.
    """
    members, num_blocks = config.members_per_carry, config.shuffle_blocks
    take = make_gather(batch._replace(carry=None, advantage=None, mask=None, weight=None), num_blocks)
    take_carry = make_gather(batch.carry, num_blocks)

    def part(params, minibatch):
        advantage, mask, weight = (leaf.reshape(leaf.shape[0], -1) for leaf in minibatch[1:4])
        carry = take_carry(minibatch.indices[:, ::members] // members)
        samples = take(minibatch.indices)._replace(advantage=advantage, mask=mask, weight=weight, carry=carry)
        samples = along_envs(samples, axis=1)
        samples = jax.lax.optimization_barrier(samples)  # or XLA repeats the gather wherever a sample is used
        per_step = mask / jnp.maximum(minibatch.num_valid, 1.0)
        (total, metrics), gradient = jax.value_and_grad(loss, argnums=2, has_aux=True)(
            config, policy, params, samples, per_step, hyperparams
        )
        return total, metrics, gradient

    def gradient(params, minibatch):
        num_steps, _, num_sequences = minibatch.mask.shape
        number = config.num_microbatches
        if number is None:
            number = default_microbatches(config, num_steps * num_blocks, num_sequences)
        if number == 1:
            return part(params, minibatch)
        size = num_sequences // number

        def accumulate(i, sums):
            here = [jax.lax.dynamic_slice_in_dim(leaf, i * size, size, axis=-1) for leaf in minibatch[:-1]]
            (total, metrics, gradient), new = sums, part(params, Minibatch(*here, minibatch.num_valid))
            ratio_max = jnp.maximum(metrics[RATIO_MAX], new[1][RATIO_MAX])
            total, metrics, gradient = jax.tree.map(jnp.add, (total, metrics, gradient), new)
            return total, metrics | {RATIO_MAX: ratio_max}, gradient

        num_parts = number
        if config.plan.skips_empty_parts:
            # Neighbours that share a carry stay together, and those with a valid sample come first in each block.
            filled = jnp.any(minibatch.mask.reshape(num_steps, num_blocks, -1, members), axis=(0, 3))
            num_filled = members * jnp.max(jnp.sum(filled, axis=1))
            num_parts = (num_filled + size - 1) // size
        first = Minibatch(*(leaf[..., :size] for leaf in minibatch[:-1]), minibatch.num_valid)
        shapes = jax.eval_shape(part, params, first)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return jax.lax.fori_loop(0, num_parts, accumulate, zeros)

    return gradient

"""Observations: one array, or a pytree of arrays such as a dict, a tuple or a NamedTuple, also nested."""

import jax
import jax.numpy as jnp

from grpo_jax.types import PyTree


def leading_shape(observation: PyTree, num_axes: int) -> tuple[int, ...]:
    """The first `num_axes` sides, which all leaves share: `(B,)` of `[B, ...]`, or `(T, B)` of `[T, B, ...]`."""
    return jax.tree.leaves(observation)[0].shape[:num_axes]


def flatten_observation(observation: PyTree, num_axes: int) -> jax.Array:
    """All leaves as one array: flattened, converted to float32, and side by side.

    Args:
      observation: each leaf has `num_axes` leading axes, which stay, such as `[N, ...]`. The order is as in
        `jax.tree.leaves`: dicts by sorted key, tuples from first to last.
      num_axes: number of leading axes.

    Returns:
      `[..., features]` float32; a single leaf is returned unchanged.
    """
    leaves = jax.tree.leaves(observation)
    if len(leaves) == 1:
        return leaves[0]
    flat = (leaf.reshape(*leaf.shape[:num_axes], -1).astype(jnp.float32) for leaf in leaves)
    return jnp.concatenate(list(flat), axis=-1)


def as_rows(observation: PyTree) -> jax.Array:
    """Leaves `[N, ...]` as one float32 array `[N, features]`, the input of dense layers."""
    x = flatten_observation(observation, 1)
    return x.reshape(x.shape[0], -1).astype(jnp.float32)


def channels_first(shape: tuple[int, ...]) -> bool:
    """Whether arrays of this shape are images with their channels, or frames, first: (4, 84, 84) or (4, 84, 84, 3).

    The first axis is at most half as long as the two after it, which have at least 8 pixels and differ at most twofold.
    """
    if len(shape) not in (3, 4):
        return False
    channels, least, most = shape[0], min(shape[1:3]), max(shape[1:3])
    return 2 * channels <= least and least >= 8 and most <= 2 * least

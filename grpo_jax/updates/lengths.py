"""Updates read the steps that exist: those after the longest episode of a rollout are left out."""

import jax
import jax.numpy as jnp

from grpo_jax.types import PyTree

SHORTEST = 16
"""Fewer steps cost an update little less."""


def rounded_length(longest: int, limit: int) -> int:
    """A number of steps from `longest` to `limit`: one of 16, 24, 32, 48, 64, 96, ..., as each compiles an update."""
    longest = max(longest, SHORTEST)
    half_power = 2 ** ((longest - 1).bit_length() - 2)
    return min(-(-longest // half_power) * half_power, limit)


def first_steps(tree: PyTree, length: int | None) -> PyTree:
    """Of leaves `[T, ...]` the first `length` steps; all for None. A leaf `[1, ...]`, such as a carry, stays."""
    return jax.tree.map(lambda leaf: leaf[:length], tree)


def with_steps(tree: PyTree, num_steps: int) -> PyTree:
    """Leaves `[L, ...]` as `[num_steps, ...]`, with zeros after the first L steps."""
    return jax.tree.map(lambda x: jnp.pad(x, [(0, num_steps - len(x))] + [(0, 0)] * (x.ndim - 1)), tree)

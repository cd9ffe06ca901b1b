"""Updates read the steps that exist: those after the longest episode of a rollout are left out."""

import jax

from grpo_jax.types import PyTree


def rounded_length(longest: int, limit: int) -> int:
    """A number of steps from `longest` to `limit`: one of 16, 24, 32, 48, 64, 96, ..., as each compiles an update."""
    longest = max(longest, 16)
    half_power = 2 ** ((longest - 1).bit_length() - 2)
    return min(-(-longest // half_power) * half_power, limit)


def first_steps(tree: PyTree, length: int | None) -> PyTree:
    """Of leaves `[T, ...]` the first `length` steps; all for None. A leaf `[1, ...]`, such as a carry, stays."""
    return jax.tree.map(lambda leaf: leaf[:length], tree)

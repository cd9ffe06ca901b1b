"""The user's own functions and the arrays that they give, as errors describe and compare them."""

from typing import Any

import jax

from grpo_jax.types import PyTree


def describe_function(field: str, value: Any) -> str:
    """The field of a config with its value: a name or a path in quotes, or the name of a function."""
    return f"{field}={getattr(value, '__qualname__', repr(value))}"


def describe_arrays(tree: PyTree) -> str:
    """Dtypes and shapes, such as float32[3, 2]."""
    described = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree)
    return described if isinstance(described, str) else str(described).replace("'", "")


def are_alike(tree: PyTree, other: PyTree) -> bool:
    """Whether two trees of arrays have the same structure, shapes and dtypes."""

    def types(tree):
        return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]

    return jax.tree.structure(tree) == jax.tree.structure(other) and types(tree) == types(other)

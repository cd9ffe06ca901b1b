"""The types of states and observations, which are the same after every step, as a compiled loop needs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.errors import ConfigError
from grpo_jax.types import PyTree, by_path

_KINDS = (np.bool_, np.integer, np.floating, np.complexfloating)


def without_weak_type(leaf: Any) -> jax.Array:
    """The leaf without JAX's weak type, which would trigger a second compile."""
    leaf = jnp.asarray(leaf)
    return jnp.asarray(leaf, leaf.dtype)


def cast_like(tree: PyTree, like: PyTree, what: str) -> PyTree:
    """The arrays of `tree`, which comes from a step, with the dtypes of `like`, which comes from a reset.

    In some environments the dtypes differ, such as a float after a reset and an integer after a step. A cast to a
    narrower kind would lose information: from a float to an integer, or from an integer to a boolean.

    Args:
      tree: arrays and numbers.
      like: arrays, or their shapes and dtypes.
      what: name of the trees, for errors.

    Raises:
      ConfigError: the trees differ in their structure or in a shape, or a cast would lose information; with the leaf.
    """
    if jax.tree.structure(tree) != jax.tree.structure(like):
        raise ConfigError(f"{what} has {_difference(tree, like)}; return the same structure")

    def cast(path, leaf, like):
        leaf = jnp.asarray(leaf)
        if leaf.shape == like.shape and _keeps_information(leaf.dtype, like.dtype):
            return jnp.asarray(leaf, like.dtype)
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        after, before = (f"{x.dtype}{list(x.shape)}" for x in (leaf, like))
        raise ConfigError(
            f"{what} has {f'{name!r} of ' if name else ''}type {before} after a reset, but {after} after a step; "
            f"return the same {'shape' if leaf.shape != like.shape else 'dtype'}"
        )

    return jax.tree_util.tree_map_with_path(cast, tree, like)


def _difference(tree: PyTree, like: PyTree) -> str:
    """The leaves that only one of two trees has, or else their structures."""
    only = {"after a reset": by_path(like).keys() - by_path(tree), "after a step": by_path(tree).keys() - by_path(like)}
    named = [f"{path!r} only {when}" for when, paths in only.items() for path in sorted(paths) if path]
    if named:
        return ", ".join(named)
    return f"the structure {jax.tree.structure(like)} after a reset, but {jax.tree.structure(tree)} after a step"


def _keeps_information(dtype: Any, wanted: Any) -> bool:
    """Whether a cast does not narrow the kind of number. Random keys have no kind, so their dtypes must be equal."""
    kinds = [next((i for i, kind in enumerate(_KINDS) if jnp.issubdtype(d, kind)), None) for d in (dtype, wanted)]
    return dtype == wanted if None in kinds else kinds[0] <= kinds[1]

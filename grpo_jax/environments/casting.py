"""The types of states and observations: the same after every step, as a compiled loop needs; none narrows a number."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.errors import ConfigError, describe_arrays, first_line
from grpo_jax.types import PyTree, first_difference

_KINDS = (np.bool_, np.integer, np.floating, np.complexfloating)


def as_values(returned: Any, names: tuple[str, ...], part: str) -> tuple:
    """What a part of an environment returned, or a ConfigError if it is not one value for each of these names."""
    is_sequence = isinstance(returned, tuple | list)
    if not is_sequence or len(returned) != len(names):
        what = f"{len(returned)} values" if is_sequence else type(returned).__name__
        raise ConfigError(f"{part} returns {what}; return the {len(names)} values {', '.join(names)}")
    return returned


def cast_like(tree: PyTree, like: PyTree, what: str) -> PyTree:
    """The arrays of `tree`, which comes from a step, with the dtypes of `like`, which comes from a reset.

    In some environments they differ, such as a float after a reset and an integer after a step. A cast to a narrower
    kind would lose information, from a float to an integer or from an integer to a boolean: a ConfigError, as for
    another structure or shape.
    """
    tree = jax.tree.map(jnp.asarray, tree)
    structure, wanted = jax.tree.structure(tree), jax.tree.structure(like)
    if structure != wanted:
        path, after, before = first_difference(tree, like) or ("", structure, wanted)
        raise ConfigError(f"{what} has {path!r}: {before} after a reset, {after} after a step; keep the structure")

    def cast(path, leaf, like):
        if leaf.shape == like.shape and _keeps_information(leaf.dtype, like.dtype):
            return jnp.asarray(leaf, like.dtype)
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        after, before = (f"{x.dtype}{list(x.shape)}" for x in (leaf, like))
        raise ConfigError(
            f"{what} has {f'{name!r} of ' if name else ''}type {before} after a reset, but {after} after a step; "
            f"return the same {'shape' if leaf.shape != like.shape else 'dtype'}"
        )

    return jax.tree_util.tree_map_with_path(cast, tree, like)


def _keeps_information(dtype: Any, wanted: Any) -> bool:
    """Whether a cast does not narrow the kind of number. Random keys have no kind, so their dtypes must be equal."""
    kinds = [next((i for i, kind in enumerate(_KINDS) if jnp.issubdtype(d, kind)), None) for d in (dtype, wanted)]
    return dtype == wanted if None in kinds else kinds[0] <= kinds[1]


def exact_leaves(given: PyTree, values: PyTree, what: str, *, single: bool = False) -> list[jax.Array | np.ndarray]:
    """The arrays of values from anywhere with the dtypes of `given`, where that loses no more than digits of reals.

    Arrays of JAX, also traced ones, are judged by their dtype as in `cast_like`, others by their numbers. With
    `single` their shapes must be those of `given`. What is returned is never the caller's own array of NumPy.

    Raises:
      ConfigError: the values have another structure, or a number has no place in its dtype.
    """
    like, structure = jax.tree.flatten(given)
    try:
        leaves = structure.flatten_up_to(_plain(values))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} is {describe_arrays(given)}, but another was given: {first_line(error)}") from error
    leaves = [_exactly(leaf, each.dtype, what) for leaf, each in zip(leaves, like, strict=True)]
    if single and (other := [pair for pair in zip(leaves, like, strict=True) if pair[0].shape != pair[1].shape]):
        raise ConfigError("{} has {} in place of {}".format(what, *map(describe_arrays, other[0])))
    return leaves


def _plain(tree: PyTree) -> PyTree:
    """Mappings of any class as dicts, also in tuples."""
    if isinstance(tree, Mapping):
        return {name: _plain(each) for name, each in tree.items()}
    return tuple(map(_plain, tree)) if type(tree) is tuple else tree


def _exactly(value: Any, dtype: Any, what: str) -> jax.Array | np.ndarray:
    if isinstance(value, jax.Array):
        if not _keeps_information(value.dtype, dtype):
            raise ConfigError(f"{what} is {value.dtype}, but its type is {dtype}; convert it")
        return jnp.asarray(value, dtype)
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise ConfigError(f"{what} is of type {dtype}, but was given {type(value).__name__}; give numbers")
    with np.errstate(all="ignore"):
        cast = array.astype(dtype)
    lost = np.isfinite(array) & ~np.isfinite(cast) if jnp.issubdtype(dtype, jnp.floating) else cast != array
    if np.any(lost):
        raise ConfigError(
            f"{what} has {array[lost].flat[0]!r}, but its type is {np.dtype(dtype)}, which would make "
            f"{cast[lost].flat[0]!r} of it; give the space the type of its values"
        )
    return cast

"""One vector of all parameters: an optimiser is then a few kernels, instead of a few for each array."""

from collections.abc import Callable

import jax
import optax
from jax.flatten_util import ravel_pytree

from grpo_jax.devices.execution_plan import ExecutionPlan
from grpo_jax.devices.mesh import model_is_split
from grpo_jax.types import PyTree


class Elementwise(optax.GradientTransformationExtraArgs):
    """A transformation that is the same function of each element and of norms of all: it may get one vector of all."""


def make_flattening(
    optimizer: optax.GradientTransformation, params: PyTree, plan: ExecutionPlan
) -> tuple[Callable, Callable]:
    """`flatten(tree)` replaces every part of a tree that is structured like the parameters by one vector.

    Parameters, their gradient and Adam's moments have such parts. Elementwise optimisers and global norms give the same
    on vectors, up to the order of sums.

    Args:
      optimizer: nothing is flattened unless it is `Elementwise`.
      params: the parameters, or their shapes.
      plan: its `max_flat_parameters`; larger policies stay as they are, and so do those that are split over devices or
        have parameters of several dtypes.

    Returns:
      `flatten` and its inverse, `unflatten`.
    """
    leaves, structure = jax.tree.flatten(params)
    size = sum(leaf.size for leaf in leaves)
    has_one_dtype = len({leaf.dtype for leaf in leaves}) == 1
    fits = size <= plan.max_flat_parameters and has_one_dtype and not model_is_split()
    if not isinstance(optimizer, Elementwise) or len(leaves) < 2 or not fits:
        return (lambda tree: tree), (lambda tree: tree)

    _, unravel = ravel_pytree(params)

    def is_params(part):
        return jax.tree.structure(part) == structure

    def flatten(tree):
        return jax.tree.map(lambda part: ravel_pytree(part)[0] if is_params(part) else part, tree, is_leaf=is_params)

    def unflatten(tree):
        return jax.tree.map(lambda leaf: unravel(leaf) if leaf.shape == (size,) else leaf, tree)

    return flatten, unflatten

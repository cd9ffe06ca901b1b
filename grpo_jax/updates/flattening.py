"""One vector of all parameters: an optimiser is then a few kernels, instead of a few for each array."""

from collections.abc import Callable

import jax
from jax.flatten_util import ravel_pytree

from grpo_jax.devices.execution_plan import ExecutionPlan
from grpo_jax.devices.mesh import model_is_split
from grpo_jax.types import PyTree


def make_flattening(params: PyTree, plan: ExecutionPlan) -> tuple[Callable, Callable]:
    """`flatten(tree)` replaces every part of a tree that is structured like the parameters by one vector.

    Parameters, their gradient, Adam's moments and a `Learner` have such parts. Elementwise optimisers and global norms
    give the same on vectors, up to the order of sums.

    Args:
      params: the parameters, or their shapes.
      plan: its `max_flat_parameters`; larger policies stay as they are, and so do those that are split over devices or
        have parameters of several dtypes.

    Returns:
      `flatten` and its inverse, `unflatten`.
    """
    leaves, structure = jax.tree.flatten(params)
    size = sum(leaf.size for leaf in leaves)
    has_one_dtype = len({leaf.dtype for leaf in leaves}) == 1
    if len(leaves) < 2 or size > plan.max_flat_parameters or not has_one_dtype or model_is_split():
        return (lambda tree: tree), (lambda tree: tree)

    _, unravel = ravel_pytree(params)

    def is_params(part):
        return jax.tree.structure(part) == structure

    def flatten(tree):
        return jax.tree.map(lambda part: ravel_pytree(part)[0] if is_params(part) else part, tree, is_leaf=is_params)

    def unflatten(tree):
        return jax.tree.map(lambda leaf: unravel(leaf) if leaf.shape == (size,) else leaf, tree)

    return flatten, unflatten

"""How the state of an optimiser is kept: for one vector of all parameters, or in bfloat16."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from grpo_jax.errors import ConfigError
from grpo_jax.types import PyTree

MAX_FLAT_PARAMETERS = 2**20
"""The most parameters of one dtype that are copied into one vector.

A vector is quick to compile: PPO in 7.0 s, as a tree of twelve arrays in 8.0 (one CPU core). With many seeds it costs
time on a GPU: 2,048 of them trained 1.15 times as fast without it on an H200, which was equal at other sizes.
"""


class OnOneVector(optax.GradientTransformation):
    """An optimiser whose state is for one vector of all parameters. It updates trees, or the vectors themselves."""


def on_one_vector(optimizer: optax.GradientTransformation) -> OnOneVector:
    """The optimiser, which must be the same function of each element and of norms of all, on one vector.

    Several dtypes, or more than `MAX_FLAT_PARAMETERS`, stay a tree.
    """

    def update(gradient, state, params=None):
        if not _fits(gradient):
            return optimizer.update(gradient, state, params)
        vector, unflatten = ravel_pytree(gradient)
        steps, state = optimizer.update(vector, state, _flatten(params))
        return unflatten(steps), state

    return OnOneVector(lambda params: optimizer.init(_flatten(params)), update)


def make_flattening(optimizer: optax.GradientTransformation, params: PyTree) -> tuple[Callable, Callable]:
    """`flatten` makes one vector of parameters or gradients, if the state is for one; `unflatten` is its inverse.

    All of an update is then a few kernels, instead of a few for each array.
    """
    if isinstance(optimizer, OnOneVector) and _fits(params):
        return _flatten, ravel_pytree(params)[1]
    return (lambda tree: tree), (lambda tree: tree)


def _flatten(tree: PyTree) -> PyTree:
    return ravel_pytree(tree)[0] if _fits(tree) else tree


def _fits(tree: PyTree) -> bool:
    leaves = jax.tree.leaves(tree)
    return sum(leaf.size for leaf in leaves) <= MAX_FLAT_PARAMETERS and len({leaf.dtype for leaf in leaves}) == 1


class Bfloat16State(NamedTuple):
    """The state of the optimiser, and its number of updates, from which the rounding draws."""

    count: jax.Array  # int32
    state: Any  # bfloat16 instead of float32 arrays


def bfloat16_moments(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimiser with its moments kept in bfloat16, and computed in float32.

    Moments are rounded stochastically, up or down with probabilities that make the mean exact. Rounded to the nearest,
    a second moment could not decay: with beta2 = 0.999 an update takes at most a thousandth of it away, less than half
    of the 2^-8 to 2^-7 between neighbours in bfloat16.

    Raises:
      ConfigError: in `init`, if the optimiser keeps no moments.
    """

    def init(params: PyTree) -> Bfloat16State:
        count = jnp.zeros((), jnp.int32)
        state = _to_bfloat16(optimizer.init(params), count)
        if not any(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(state)):
            raise ConfigError(
                "moments_dtype='bfloat16' has no effect on an optimizer without moments; leave it out, or use 'adam', "
                "'adamw', 'rmsprop', 'muon', or 'sgd' with beta1"
            )
        return Bfloat16State(count, state)

    def update(gradient: PyTree, state: Bfloat16State, params: PyTree = None) -> tuple[PyTree, Bfloat16State]:
        full = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf, state.state)
        steps, full = optimizer.update(gradient, full, params)
        count = optax.safe_increment(state.count)
        return steps, Bfloat16State(count, _to_bfloat16(full, count))

    return optax.GradientTransformation(init, update)


def _to_bfloat16(tree: PyTree, count: jax.Array) -> PyTree:
    """The float32 arrays of a tree in bfloat16; scalars are unchanged."""
    leaves, structure = jax.tree.flatten(tree)
    key = jax.random.fold_in(jax.random.key(0), count)
    for i, leaf in enumerate(leaves):
        if leaf.dtype == jnp.float32 and leaf.ndim:
            leaves[i] = stochastically_rounded(leaf, jax.random.fold_in(key, i))
    return jax.tree.unflatten(structure, leaves)


def stochastically_rounded(x: jax.Array, key: jax.Array) -> jax.Array:
    """float32 in bfloat16: one of the two neighbours of each number, whose expected value is the number.

    bfloat16 is the upper half of float32. A random number is added to the lower half before it is cut off.
    """
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise
    return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)

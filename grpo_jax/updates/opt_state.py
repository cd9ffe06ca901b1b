"""The moments of an optimiser in bfloat16."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from grpo_jax.errors import ConfigError
from grpo_jax.types import PyTree


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

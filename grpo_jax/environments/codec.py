"""One codec of an environment: observations as policies see them, and actions as the environment takes them.

Rollouts, evaluation, `TrainedPolicy.act`, exported programs and environments on the host share it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.errors import ConfigError
from grpo_jax.types import PyTree


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of an observation as the environment gives it, and how policies see it."""

    shape: tuple[int, ...]
    dtype: Any
    seen_dtype: Any  # that policies see
    num_values: int = 0  # of an integer, which becomes one-hot; 0: it stays as it is
    start: int = 0  # the smallest of these values

    def encode(self, x: jax.Array) -> jax.Array:
        """The array as policies see it."""
        if self.num_values:
            return jax.nn.one_hot(x - self.start if self.start else x, self.num_values).reshape(-1)
        return jnp.asarray(x, self.seen_dtype)


class Codec(NamedTuple):
    """Both ways of one environment's values, one observation or action at a time: `vmap` for batches."""

    leaves: PyTree  # a `Leaf` for each array of an observation
    decode: Callable = lambda action: action  # (action in the `ActionSpace`) -> as the environment takes it

    def encode(self, observation: PyTree) -> PyTree:
        """The observation as policies see it."""
        return jax.tree.map(lambda leaf, x: leaf.encode(x), self.leaves, observation)

    @property
    def given(self) -> PyTree:
        """Shape and dtype of each array of an observation as the environment gives it."""
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self.leaves)


def plain_codec(observation: PyTree) -> Codec:
    """The codec that changes nothing, for observations of these shapes and dtypes."""
    return Codec(jax.tree.map(lambda leaf: Leaf(leaf.shape, leaf.dtype, leaf.dtype), observation))


def observation_codec(env: Any, defaults: Any, first: PyTree, name: str, is_known: bool) -> PyTree:
    """The leaves of a codec for observations like `first`; integer scalars become one-hot.

    Raises:
      ConfigError: there is no array, or an integer scalar whose range `observation_space(params)` does not tell.
    """
    if not jax.tree.leaves(first):
        raise ConfigError(f"{name!r} observes {first}; an observation must have at least one array")
    # MinAtar's and Pong's are 0 or 1: bytes need a quarter of the memory traffic. A GPU's matrix products read int8
    # without a conversion before them, but not uint8.
    bits = jnp.int8 if is_known and name.endswith(("-MinAtar", "Pong-misc")) else None

    def leaf(path, x):
        if x.shape == () and jnp.issubdtype(x.dtype, jnp.integer):
            return Leaf((), x.dtype, None, *_values(env, defaults, path, name))
        return Leaf(x.shape, x.dtype, bits or x.dtype)

    return jax.tree_util.tree_map_with_path(leaf, first)


def _values(env: Any, defaults: Any, path: tuple, name: str) -> tuple[int, int]:
    """The number of values of an observed integer and the first, from the part of the space at this path."""
    try:
        space = env.observation_space(defaults)
        for entry in path:
            key = next(getattr(entry, name) for name in ("key", "idx", "name") if hasattr(entry, name))
            space = getattr(space, "spaces", space)[key]
        return int(space.num_actions if hasattr(space, "num_actions") else space.n), int(getattr(space, "start", 0))
    except (AttributeError, IndexError, KeyError, NotImplementedError, TypeError) as error:
        raise ConfigError(
            f"{name!r} observes an integer of unknown range{jax.tree_util.keystr(path)}; give it an "
            "observation_space(params) with n, or observe an array"
        ) from error

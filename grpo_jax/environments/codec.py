"""One codec of an environment: observations as policies see them, and actions as the environment takes them.

Rollouts, evaluation, `TrainedPolicy.act`, exported programs, frame stacks and environments on the host share it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.environments.spaces import ActionSpace, Box, Discrete, MultiDiscrete
from grpo_jax.errors import ConfigError
from grpo_jax.observations import channels_first
from grpo_jax.types import PyTree


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of an observation as the environment gives it, and how policies see it."""

    shape: tuple[int, ...]
    dtype: Any
    seen_dtype: Any  # that policies see
    num_values: int = 0  # of an integer, which becomes one-hot; 0: it stays as it is
    start: int = 0  # the smallest of these values
    first_axis_last: bool = False  # of stacked images with their channels first

    def encode(self, x: jax.Array) -> jax.Array:
        """The array as policies see it."""
        if self.num_values:
            return jax.nn.one_hot(x - self.start if self.start else x, self.num_values).reshape(-1)
        x = jnp.asarray(x, self.seen_dtype)
        return jnp.moveaxis(x, 0, -1) if self.first_axis_last else x

    def stacked(self, num_frames: int) -> "Leaf":
        """Of so many frames side by side: along the axis of channels, the first or the last, or a new last one."""
        first, *rest = self.shape or (1,)
        if channels_first(self.shape):
            return dataclasses.replace(self, shape=(num_frames * first, *rest), first_axis_last=True)
        *rest, last = (*self.shape, 1) if len(self.shape) in (0, 2) else self.shape
        return dataclasses.replace(self, shape=(*rest, num_frames * last))


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


def action_codec(space: Any, name: str) -> tuple[ActionSpace, Callable]:
    """The `ActionSpace` of a space of gymnax or gymnasium, and the function from its actions to that space's.

    Spaces are known by their class, or one it is derived from. The function takes arrays of JAX and of NumPy.

    Raises:
      ConfigError: for other spaces, and for a `Box` of whole numbers.
    """
    if isinstance(space, ActionSpace):
        return space, lambda action: action
    start = getattr(space, "start", 0)
    match _kind(space):
        case "Discrete":
            return Discrete(int(space.n)), (lambda action: action + int(start)) if start else lambda action: action
        case "Box" if jnp.issubdtype(space.dtype, jnp.floating):
            low, high = (np.broadcast_to(bound, space.shape).reshape(-1) for bound in (space.low, space.high))
            shape = Box(*(tuple(bound.astype(float).tolist()) for bound in (low, high)))
        case "MultiDiscrete":
            shape = MultiDiscrete(tuple(np.ravel(space.nvec).tolist()))
        case "MultiBinary":
            shape = MultiDiscrete((2,) * int(np.prod(space.shape)))
        case "Tuple" if all(_kind(part) == "Discrete" for part in space.spaces):
            parts, decoders = zip(*(action_codec(part, name) for part in space.spaces), strict=True)
            return MultiDiscrete(tuple(part.num_actions for part in parts)), lambda action: tuple(
                decode(each) for decode, each in zip(decoders, action, strict=True)
            )
        case _:
            raise ConfigError(
                f"actions of {name!r} in {space} are not supported; use Discrete, MultiDiscrete, MultiBinary, a Box of "
                "real numbers or a Tuple of Discrete"
            )
    dtype = jax.dtypes.canonicalize_dtype(space.dtype)
    offset = np.asarray(start, dtype) if np.any(start) else None

    def decode(action):
        action = action.reshape(tuple(space.shape)).astype(dtype)
        return action if offset is None else action + offset

    return shape, decode


def host_actions(space: Any, name: str) -> tuple[np.ndarray, Callable]:
    """An action in a space of gymnasium, kept in few bytes, and the function from such arrays to its actions."""
    canonical, decode = action_codec(space, name)
    with jax.ensure_compile_time_eval():
        action = decode(some_action(canonical))
    if isinstance(action, tuple):
        raise ConfigError(f"actions of {name!r} in {space} are not supported on the host; use MultiDiscrete")
    dtype = action.dtype
    if not isinstance(canonical, Box):
        least = np.asarray(getattr(space, "start", 0))
        most = least + np.reshape(canonical.num_actions, np.shape(action)) - 1
        dtype = np.result_type(np.min_scalar_type(least.min()), np.min_scalar_type(most.max()))
    is_number = isinstance(canonical, Discrete)
    return np.asarray(action, dtype), int if is_number else lambda action: action.astype(space.dtype)


def observation_shapes(space: Any, name: str) -> PyTree:
    """Shape and dtype of each array of an observation in a space of gymnasium; `Dict` and `Tuple` are plain ones."""
    match _kind(space):
        case "Dict":
            return {key: observation_shapes(part, name) for key, part in space.spaces.items()}
        case "Tuple":
            return tuple(observation_shapes(part, name) for part in space.spaces)
        case None:
            raise ConfigError(
                f"observations of {name!r} in {space} have no fixed shape; use Box, Discrete, MultiDiscrete, "
                "MultiBinary, or a Dict or Tuple of them"
            )
    return jax.ShapeDtypeStruct(space.shape, jax.dtypes.canonicalize_dtype(space.dtype))


def _kind(space: Any) -> str | None:
    known = "Discrete", "Box", "MultiDiscrete", "MultiBinary", "Tuple", "Dict"
    return next((each.__name__ for each in type(space).__mro__ if each.__name__ in known), None)


def some_action(space: ActionSpace) -> jax.Array:
    """An action in the space: 0, or the nearest one."""
    match space:
        case Box(low, high):
            return jnp.clip(jnp.zeros(len(low)), jnp.array(low), jnp.array(high))
        case MultiDiscrete(num_actions):
            return jnp.zeros(len(num_actions), jnp.int32)
    return jnp.zeros((), jnp.int32)


def observation_codec(env: Any, defaults: Any, first: PyTree, name: str) -> PyTree:
    """The leaves of a codec for observations like `first`; integer scalars become one-hot.

    Raises:
      ConfigError: there is no array, or an integer scalar whose range `observation_space(params)` does not tell.
    """
    if not jax.tree.leaves(first):
        raise ConfigError(f"{name!r} observes {first}; an observation must have at least one array")
    # MinAtar's and Pong's are 0 or 1: bytes need a quarter of the memory traffic. A GPU's matrix products read int8
    # without a conversion before them, but not uint8.
    is_ours = type(env).__module__.startswith(("gymnax.", "grpo_jax."))
    bits = jnp.int8 if is_ours and name.endswith(("-MinAtar", "Pong-misc")) else None

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
        return int(space.n), int(getattr(space, "start", 0))
    except (AttributeError, IndexError, KeyError, NotImplementedError, TypeError) as error:
        raise ConfigError(
            f"{name!r} observes an integer of unknown range{jax.tree_util.keystr(path)}; give it an "
            "observation_space(params) with n, or observe an array"
        ) from error

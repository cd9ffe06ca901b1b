"""Action spaces, static and hashable, and what they and observations are in spaces of gymnax and gymnasium."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.errors import ConfigError, as_count
from grpo_jax.types import PyTree


class Discrete(NamedTuple):
    """One of `num_actions` actions: an integer scalar."""

    num_actions: int


class MultiDiscrete(NamedTuple):
    """One action in each of several dimensions: integers `[len(num_actions)]`."""

    num_actions: tuple[int, ...]


class Box(NamedTuple):
    """A real vector `[len(low)]` between bounds that may be infinite."""

    low: tuple[float, ...]
    high: tuple[float, ...]


ActionSpace = Discrete | MultiDiscrete | Box  # what a policy can choose from


def action_codec(space: Any, name: str) -> tuple[ActionSpace, Callable]:
    """The `ActionSpace` of a space of gymnax or gymnasium, and the function from its actions to that space's.

    Spaces are known by their class, or one it is derived from. The function takes arrays of JAX and of NumPy.

    Raises:
      ConfigError: for other spaces, and for a `Box` of whole numbers.
    """
    if isinstance(space, Discrete):
        return Discrete(as_count("num_actions", space.num_actions)), lambda action: action
    if isinstance(space, ActionSpace):  # a number is a vector of one
        return type(space)(*(tuple(np.ravel(each).tolist()) for each in space)), lambda action: action
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
        case _:
            raise ConfigError(
                f"actions of {name!r} in {space} are not supported; use Discrete, MultiDiscrete, MultiBinary or a Box "
                "of real numbers"
            )
    dtype = jax.dtypes.canonicalize_dtype(space.dtype)
    offset = np.asarray(start, dtype) if np.any(start) else None

    def decode(action):
        action = action.reshape(tuple(space.shape)).astype(dtype)
        return action if offset is None else action + offset

    return shape, decode


def host_actions(space: Any, name: str) -> tuple[np.ndarray, Callable]:
    """An action's array in a space of gymnasium, and the function from such arrays to its actions."""
    canonical, decode = action_codec(space, name)
    with jax.ensure_compile_time_eval():
        action = decode(some_action(canonical))
    as_given = int if isinstance(canonical, Discrete) else lambda action: action.astype(space.dtype)
    return np.asarray(action), as_given


def observed_spaces(space: Any, name: str) -> PyTree:
    """The space of each array of an observation in a space of gymnasium; `Dict` and `Tuple` are plain ones."""
    match _kind(space):
        case "Dict":
            return {key: observed_spaces(part, name) for key, part in space.spaces.items()}
        case "Tuple":
            return tuple(observed_spaces(part, name) for part in space.spaces)
        case None:
            raise ConfigError(
                f"observations of {name!r} in {space} have no fixed shape; use Box, Discrete, MultiDiscrete, "
                "MultiBinary, or a Dict or Tuple of them"
            )
    return space


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

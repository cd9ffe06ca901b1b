"""What the adapter needs of gymnasium's interface: simulators, observations as lists of arrays, actions as arrays."""

import copy
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.environments.spaces import ActionSpace, Box, Discrete, MultiDiscrete
from grpo_jax.errors import ConfigError
from grpo_jax.types import PyTree


class Outcome(NamedTuple):
    """The result of one step of a simulator."""

    observation: Any
    reward: float
    terminated: bool
    truncated: bool


class Simulators(Protocol):
    """Any number of simulators of one environment. Each plays one episode, which is a function of its seed."""

    observation_space: Any  # a space of gymnasium
    action_space: Any  # a space of gymnasium
    max_steps: int | None  # the environment's own time limit; None: it has none

    def first_observations(self, seeds: Sequence[int]) -> list[Any]:
        """The observations that episodes with these seeds begin with."""
        ...

    def begin(self, seeds: Sequence[int]) -> list[tuple[Any, Any]]:
        """A simulator at the beginning of an episode, and its observation, for each seed."""
        ...

    def step(self, simulators: Sequence[Any], actions: Sequence[Any]) -> list[Outcome]:
        """One step of each of these simulators, which are distinct."""
        ...

    def release(self, simulator: Any) -> None:
        """Gives back a simulator whose episode is not continued."""
        ...


class Instances:
    """`Simulators` with gymnasium's interface: instances that are used again, stepped one after another.

    Observations are copied, as an instance may write the next one into the same array.
    """

    def __init__(self, make: Callable[[], Any]):
        self._make, self._free = make, [make()]
        (instance,) = self._free
        self.observation_space, self.action_space = instance.observation_space, instance.action_space
        self.max_steps = getattr(getattr(instance, "spec", None), "max_episode_steps", None)

    def first_observations(self, seeds: Sequence[int]) -> list[Any]:
        """See `Simulators`. One instance is reset with each seed."""
        observations = []
        for seed in seeds:
            ((instance, observation),) = self.begin([seed])
            observations.append(observation)
            self.release(instance)
        return observations

    def begin(self, seeds: Sequence[int]) -> list[tuple[Any, Any]]:
        instances = [self._free.pop() if self._free else self._make() for _ in seeds]
        pairs = zip(instances, seeds, strict=True)
        return [(instance, copy.deepcopy(instance.reset(seed=seed)[0])) for instance, seed in pairs]

    def step(self, simulators: Sequence[Any], actions: Sequence[Any]) -> list[Outcome]:
        outcomes = (instance.step(action) for instance, action in zip(simulators, actions, strict=True))
        return [Outcome(copy.deepcopy(observation), *others[:3]) for observation, *others in outcomes]

    def release(self, simulator: Any) -> None:
        self._free.append(simulator)


def observation_leaves(space: Any) -> tuple[PyTree, Callable[[Any], list[np.ndarray]]]:
    """The shapes and dtypes of an observation, and the function that gives the list of its arrays.

    The list has the order of `jax.tree.leaves`. Arrays keep their dtype, but float64 and int64 become float32 and
    int32. A `Discrete` is an int32 scalar that counts from 0, whatever its `start`. `Dict` and `Tuple` are plain dicts
    and tuples.

    Raises:
      ConfigError: for another space, whose observations have no fixed shape.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Dict | spaces.Tuple):
        is_dict = isinstance(space, spaces.Dict)
        names = sorted(space.spaces) if is_dict else range(len(space.spaces))
        shapes, encoders = zip(*(observation_leaves(space.spaces[name]) for name in names), strict=True)

        def leaves(observation):
            parts = zip(names, encoders, strict=True)
            return [leaf for name, encode in parts for leaf in encode(observation[name])]

        return dict(zip(names, shapes, strict=True)) if is_dict else tuple(shapes), leaves
    if not isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        raise ConfigError(
            f"observations in {space} have no fixed shape; use Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or "
            "Tuple of them"
        )
    dtype, start = np.dtype(jax.dtypes.canonicalize_dtype(space.dtype)), getattr(space, "start", None)

    def leaf(observation):
        array = np.asarray(observation if start is None else observation - start, dtype)
        if array.shape != space.shape:
            raise ValueError(f"an observation has shape {array.shape}, but its space is {space}")
        return [array]

    return jax.ShapeDtypeStruct(space.shape, dtype), leaf


def action_decoder(space: Any) -> tuple[ActionSpace, jax.ShapeDtypeStruct, Callable[[np.ndarray], Any]]:
    """The `ActionSpace` of a space of gymnasium, an action's shape and dtype, and the function to gymnasium's actions.

    Raises:
      ConfigError: for another space than `Discrete`, `MultiDiscrete`, `MultiBinary` and `Box` of real numbers.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        num_actions, start = int(space.n), int(space.start)
        return Discrete(num_actions), _smallest((), num_actions), lambda action: int(action) + start
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
        sizes = np.ravel(space.nvec) if isinstance(space, spaces.MultiDiscrete) else np.full(np.prod(space.shape), 2)
        start, sizes = getattr(space, "start", 0), tuple(map(operator.index, sizes))
        shape = _smallest((len(sizes),), max(sizes))
        return MultiDiscrete(sizes), shape, lambda action: action.reshape(space.shape).astype(space.dtype) + start
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        low, high = (tuple(np.ravel(bound).astype(float).tolist()) for bound in (space.low, space.high))
        shape = jax.ShapeDtypeStruct((len(low),), jnp.float32)
        return Box(low, high), shape, lambda action: action.reshape(space.shape).astype(space.dtype)
    raise ConfigError(f"actions in {space} are not supported; use Discrete, MultiDiscrete, MultiBinary or a real Box")


def _smallest(shape: tuple[int, ...], num_actions: int) -> jax.ShapeDtypeStruct:
    """The smallest integers that hold an action: a state has all actions of its episode."""
    return jax.ShapeDtypeStruct(shape, np.min_scalar_type(num_actions - 1))

"""Simulators on the host: the interface that the adapter needs, and gymnasium's environments behind it."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol


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
        """See `Simulators`."""
        instances = [self._free.pop() if self._free else self._make() for _ in seeds]
        pairs = zip(instances, seeds, strict=True)
        return [(instance, copy.deepcopy(instance.reset(seed=seed)[0])) for instance, seed in pairs]

    def step(self, simulators: Sequence[Any], actions: Sequence[Any]) -> list[Outcome]:
        """See `Simulators`."""
        outcomes = (instance.step(action) for instance, action in zip(simulators, actions, strict=True))
        return [Outcome(copy.deepcopy(observation), *others[:3]) for observation, *others in outcomes]

    def release(self, simulator: Any) -> None:
        """See `Simulators`."""
        self._free.append(simulator)

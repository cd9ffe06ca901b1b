"""Episodes on the host as a pure function of their seed and actions, with instances as its cache.

An instance stands at one place of one episode, and a step moves it. Where none stands at a state, another one replays
the episode from its seed. A digest of all that has happened identifies a state, so a replay that differs is found.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.environments.casting import as_values, exact_leaves
from grpo_jax.types import PyTree

_STEP = "observation", "reward", "terminated", "truncated", "info"
_NUMBERS = tuple(jax.ShapeDtypeStruct((), dtype) for dtype in (np.float32, np.bool_, np.bool_))


class Moment(NamedTuple):
    """A state of an episode, and how it was reached."""

    digest: bytes  # 8, of the seed, and of all actions and results up to here: two of 10^6 are equal with 3e-8
    arrays: list[np.ndarray]  # of the observation and, after a step, the reward and whether it terminated


class Episodes:
    """All episodes of one environment.

    Args:
      instances: the first ones, with gymnasium's interface; `make` gives more.
      given: shape and dtype of the arrays of an observation.
      decode: the instance's action for an action's array.
      max_kept: the most instances in mid-episode, and the most states, that are kept; at least the size of a batch.
    """

    def __init__(self, make: Callable, instances: Sequence[Any], given: PyTree, decode: Callable, max_kept: int):
        self._make, self._given, self._decode, self._max_kept = make, given, decode, max_kept
        self._moments: OrderedDict[tuple[bytes, bytes], Moment] = OrderedDict()  # by digest and action before it
        self._standing: OrderedDict[bytes, Any] = OrderedDict()  # instances by the digest of their state
        self._lock = threading.Lock()  # the programs of several devices call at once
        self._simulators, self.num_steps, self.num_replayed = {}, 0, 0
        self._free = [self._checked(instance) for instance in instances]

    def batch(self, function: Callable, arguments: Sequence[tuple]) -> list[Moment]:
        """The moments that `start` or `step` gives for each of these arguments; then the oldest are forgotten."""
        with self._lock:
            moments = [function(*each) for each in arguments]
            most = max(self._max_kept, len(moments))
            self._free += [self._standing.popitem(last=False)[1] for _ in range(len(self._standing) - most)]
            for _ in range(len(self._moments) - most):
                self._moments.popitem(last=False)
            return moments

    def start(self, seed: int) -> Moment:
        """The beginning of an episode. It leaves nothing behind: most are drawn in case an episode ends."""
        instance, moment = self._begin(seed)
        self._free.append(instance)
        return moment

    def step(self, seed: int, digest: bytes, actions: np.ndarray, action: np.ndarray, limit: int) -> Moment:
        """The moment after an action in the state with this digest, also a second time; `actions` are all before it."""
        key, time = (digest, action.tobytes()), len(actions) + 1
        if key not in self._moments:
            instance = self._standing.pop(digest, None) or self._replayed(seed, digest, actions, limit)
            moment = self._moments[key] = self._moved(instance, digest, action, time, limit)
            self.num_steps += 1
            if moment.arrays[-1] or time == limit or moment.digest in self._standing:
                self._free.append(instance)
            else:
                self._standing[moment.digest] = instance
        return self._moments[key]

    def _checked(self, instance: Any) -> Any:
        simulator = getattr(instance, "unwrapped", instance)
        if id(simulator) in self._simulators:
            raise ValueError("make gives a simulator again that others step; write a function such as lambda: MyEnv()")
        self._simulators[id(simulator)] = simulator
        return instance

    def _begin(self, seed: int) -> tuple[Any, Moment]:
        instance = self._free.pop() if self._free else self._checked(self._make())
        observation, _ = as_values(instance.reset(seed=seed), _STEP[::4], "reset")
        arrays = exact_leaves(self._given, observation, "an observation", single=True)
        return instance, Moment(_digest(seed.to_bytes(8, "little"), *arrays), arrays)

    def _moved(self, instance: Any, digest: bytes, action: np.ndarray, time: int, limit: int) -> Moment:
        returned = as_values(instance.step(self._decode(action)), _STEP, "step")[:4]
        *arrays, truncated = exact_leaves((self._given, *_NUMBERS), returned, "what step gives", single=True)
        if truncated and not arrays[-1] and time < limit:
            raise ValueError(
                f"the environment truncates an episode after {time} steps, before max_steps_in_episode={limit}; use "
                f"max_steps_in_episode={time}, or terminate there"
            )
        return Moment(_digest(digest, action.tobytes(), *arrays), arrays)

    def _replayed(self, seed: int, digest: bytes, actions: np.ndarray, limit: int) -> Any:
        """An instance at this state, from the beginning of its episode."""
        instance, moment = self._begin(seed)
        for time, action in enumerate(actions, 1):
            moment = self._moved(instance, moment.digest, action, time, limit)
        self.num_replayed += len(actions)
        if moment.digest != digest:
            raise ValueError(
                f"the episode with seed {seed} differs when it is played again with the same {len(actions)} actions; "
                "reset(seed=...) must determine it: draw all random numbers from self.np_random, and keep nothing from "
                "earlier episodes"
            )
        return instance


def _digest(*parts: Any) -> bytes:
    parts = (part if isinstance(part, bytes) else part.tobytes() for part in parts)
    return hashlib.blake2b(b"".join(parts), digest_size=8).digest()

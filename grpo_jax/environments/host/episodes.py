"""Episodes on the host as a pure function of their seed and actions, with simulators as its cache.

A simulator stands at one place of one episode, and a step moves it. Where no simulator stands at a state (a copy of the
state moved on with it, the state is from a checkpoint, or there are too many states), another one replays the episode
from its seed. A digest of all that has happened identifies a state, so a replay that differs is found.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.environments.host.gymnasium_interface import Outcome, Simulators

DIGEST_BYTES = 8
"""Two of 10^6 states have equal digests with probability 3e-8."""


class Moment(NamedTuple):
    """A state of an episode, and how it was reached."""

    digest: bytes  # of the seed, and of all actions and results up to here
    leaves: list[np.ndarray]  # of the observation
    reward: float = 0.0
    terminated: bool = False


class Request(NamedTuple):
    """A step to be made."""

    seed: int
    digest: bytes  # of the state before the step
    actions: np.ndarray  # [t, ...] all before it
    action: np.ndarray


class Episodes:
    """All episodes of one environment.

    Args:
      simulators: play them.
      leaves: the arrays of an observation.
      decode: the simulator's action for an action's array.
      max_kept: the most simulators in mid-episode, and the most states, that are kept; at least the size of a batch.
    """

    def __init__(self, simulators: Simulators, leaves: Callable, decode: Callable, max_kept: int):
        self._simulators, self._leaves, self._decode, self._max_kept = simulators, leaves, decode, max_kept
        self._starts: OrderedDict[int, Moment] = OrderedDict()  # by seed
        self._moments: OrderedDict[tuple[bytes, bytes], Moment] = OrderedDict()  # by digest and action before it
        self._standing: OrderedDict[bytes, Any] = OrderedDict()  # simulators by the digest of their state
        self._lock = threading.Lock()  # the programs of several devices call at once
        self.num_steps = 0
        self.num_replayed = 0

    def starts(self, seeds: Sequence[int]) -> list[Moment]:
        """The beginnings of episodes. They leave nothing behind: most are drawn in case an episode ends."""
        with self._lock:
            new = [seed for seed in dict.fromkeys(seeds) if seed not in self._starts]
            for seed, observation in zip(new, self._simulators.first_observations(new) if new else [], strict=True):
                self._starts[seed] = self._start(seed, observation)
            moments = [self._starts[seed] for seed in seeds]
            self._forget(self._starts, max(self._max_kept, len(seeds)))
            return moments

    def steps(self, requests: Sequence[Request], limit: int) -> list[Moment]:
        """The moments after these steps. The same request has the same result, also a second time."""
        with self._lock:
            keys = [(request.digest, request.action.tobytes()) for request in requests]
            new = {key: each for key, each in zip(keys, requests, strict=True) if key not in self._moments}
            standing = {key: self._standing.pop(each.digest, None) for key, each in new.items()}
            missing = [key for key in new if standing[key] is None]
            standing |= zip(missing, self._replayed([new[key] for key in missing]), strict=True)
            self.num_steps += len(new)
            outcomes = self._step([standing[key] for key in new], [each.action for each in new.values()])
            for (key, each), outcome in zip(new.items(), outcomes, strict=True):
                moment = self._moment(key, outcome)
                at_limit = len(each.actions) + 1 == limit
                _check_not_truncated(outcome, len(each.actions) + 1, limit)
                self._moments[key] = moment
                if moment.terminated or at_limit or moment.digest in self._standing:
                    self._simulators.release(standing[key])
                else:
                    self._standing[moment.digest] = standing[key]
            moments = [self._moments[key] for key in keys]
            self._forget(self._moments, max(self._max_kept, len(requests)))
            for simulator in self._forget(self._standing, max(self._max_kept, len(requests))):
                self._simulators.release(simulator)
            return moments

    def _replayed(self, requests: list[Request]) -> list[Any]:
        """Simulators at these states, from the beginning of their episodes."""
        if not requests:
            return []
        simulators, observations = zip(*self._simulators.begin([each.seed for each in requests]), strict=True)
        digests = [self._start(each.seed, o).digest for each, o in zip(requests, observations, strict=True)]
        for t in range(max(len(each.actions) for each in requests)):
            rows = [i for i, each in enumerate(requests) if t < len(each.actions)]
            actions = [requests[i].actions[t] for i in rows]
            outcomes = self._step([simulators[i] for i in rows], actions)
            for i, action, outcome in zip(rows, actions, outcomes, strict=True):
                digests[i] = self._moment((digests[i], action.tobytes()), outcome).digest
            self.num_replayed += len(rows)
        for digest, each in zip(digests, requests, strict=True):
            if digest != each.digest:
                raise ValueError(
                    f"the episode with seed {each.seed} differs when it is played again with the same "
                    f"{len(each.actions)} actions; reset(seed=...) must determine it: draw all random numbers from "
                    "self.np_random, and keep nothing from earlier episodes"
                )
        return list(simulators)

    def _step(self, simulators: list[Any], actions: list[np.ndarray]) -> list[Outcome]:
        return self._simulators.step(simulators, [self._decode(action) for action in actions]) if simulators else []

    def _start(self, seed: int, observation: Any) -> Moment:
        leaves = self._leaves(observation)
        return Moment(_digest(seed.to_bytes(8, "little"), *leaves), leaves)

    def _moment(self, before: tuple[bytes, bytes], outcome: Outcome) -> Moment:
        leaves, reward, terminated = (
            self._leaves(outcome.observation),
            np.float32(float(outcome.reward)),
            outcome.terminated,
        )
        return Moment(_digest(*before, *leaves, reward, np.bool_(terminated)), leaves, reward, terminated)

    def _forget(self, cache: OrderedDict, most: int) -> list[Any]:
        """Removes the oldest entries beyond `most`, and returns them."""
        return [cache.popitem(last=False)[1] for _ in range(len(cache) - most)]


def _digest(*parts: Any) -> bytes:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.tobytes())
    return digest.digest()


def _check_not_truncated(outcome: Outcome, time: int, limit: int) -> None:
    if outcome.truncated and not outcome.terminated and time < limit:
        raise ValueError(
            f"the environment truncates an episode after {time} steps, before max_steps_in_episode={limit}; use "
            f"max_steps_in_episode={time}, or terminate there"
        )

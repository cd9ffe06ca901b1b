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
from jax.dtypes import canonicalize_dtype

from grpo_jax.environments.casting import as_values, exact_leaves
from grpo_jax.errors import ConfigError
from grpo_jax.types import PyTree

_STEP = "observation", "reward", "terminated", "truncated", "info"
_NUMBERS = tuple(jax.ShapeDtypeStruct((), dtype) for dtype in (np.float32, np.bool_, np.bool_))


class Unrepeatable(ConfigError):
    """An episode differs when it is played again."""


class Moment(NamedTuple):
    """A state of an episode, and how it was reached."""

    digest: bytes  # 8, of the seed, and of all actions and results up to here: two of 10^6 are equal with 3e-8
    arrays: list[np.ndarray]  # of the observation, the legal actions and, after a step, the reward and terminated
    legal: Sequence[np.ndarray] = ()  # the mask of the legal actions, if there are masks
    ended: bool = False  # by the environment itself


class Episodes:
    """All episodes of one environment.

    Args:
      instances: the first ones, with gymnasium's interface; `make` gives more.
      spaces: of the arrays of an observation.
      decode: the instance's action for an action's array.
      max_kept: the most instances in mid-episode, and the most states, that are kept; at least the size of a batch.
      mask: shape and dtype of a mask of the legal actions; None: the environment has none.
    """

    def __init__(self, make: Callable, instances: Sequence, spaces: PyTree, decode: Callable, max_kept: int, mask: Any):
        self._make, self._decode, self._max_kept, self._mask = make, decode, max_kept, mask
        self._spaces = jax.tree.leaves(spaces)
        self.given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, canonicalize_dtype(x.dtype)), spaces)
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
            if moment.ended or time == limit or moment.digest in self._standing:
                self._free.append(instance)
            else:
                self._standing[moment.digest] = instance
        return self._moments[key]

    def try_out(self, choose: Callable, num_steps: int, limit: int) -> None:
        """Plays at most so many steps of an episode with the actions that `choose` gives for the legal ones, if masked.

        Then another instance plays them twice. Raises Unrepeatable if they differ. A limit of 0 is none.
        """
        (instance, moment), actions = self._begin(0), []
        while not moment.ended and len(actions) < num_steps:
            actions.append(choose(*moment.legal))
            moment = self._moved(instance, moment.digest, actions[-1], len(actions), limit)
        for _ in range(2):
            self._free.append(self._replayed(0, moment.digest, actions, limit))
        self._free.append(instance)

    def _checked(self, instance: Any) -> Any:
        simulator = getattr(instance, "unwrapped", instance)
        if id(simulator) in self._simulators:
            raise ConfigError("make gives a simulator again that others step; write a function such as lambda: MyEnv()")
        self._simulators[id(simulator)] = simulator
        return instance

    def _begin(self, seed: int) -> tuple[Any, Moment]:
        instance = self._free.pop() if self._free else self._checked(self._make())
        observation, info = as_values(instance.reset(seed=seed), _STEP[::4], "reset")
        legal = self._legal(instance, info, False)
        leaves = exact_leaves(self.given, observation, "an observation", single=True)
        arrays = [*self._in_range(leaves), *legal]
        return instance, Moment(_digest(seed.to_bytes(8, "little"), *arrays), arrays, legal)

    def _moved(self, instance: Any, digest: bytes, action: np.ndarray, time: int, limit: int) -> Moment:
        *returned, info = as_values(instance.step(self._decode(action)), _STEP, "step")
        leaves = exact_leaves((self.given, *_NUMBERS), tuple(returned), "what step gives", single=True)
        *arrays, reward, terminated, truncated = leaves
        ended = bool(terminated or truncated)
        if truncated and not terminated and time < limit:
            raise ConfigError(
                f"the environment truncates an episode after {time} steps, before max_steps_in_episode={limit}; use "
                f"max_steps_in_episode={time}, or terminate there"
            )
        legal = self._legal(instance, info, ended or time == limit)
        arrays = [*self._in_range(arrays), *legal, reward, terminated]
        return Moment(_digest(digest, action.tobytes(), *arrays), arrays, legal, ended)

    def _in_range(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        for array, space in zip(arrays, self._spaces, strict=True):
            if not (hasattr(space, "low") or space.contains(array)):  # a Box's bounds are often rough
                raise ConfigError(f"an observation has {array}, which is not in {space}; make the space larger")
        return arrays

    def _legal(self, instance: Any, info: Any, ended: bool) -> list[np.ndarray]:
        if self._mask is None:
            if "action_mask" in (info or ()):
                raise ConfigError('step gives info["action_mask"], but reset does not; give one there')
            return []
        mask, what = find_mask(instance, info) or (None, 'info["action_mask"]')
        legal = exact_leaves(self._mask, mask, what, single=True)
        if not (legal[0].any() or ended):
            raise ConfigError(f"{what} has no legal action, but the episode goes on; terminate it there")
        return legal

    def _replayed(self, seed: int, digest: bytes, actions: np.ndarray, limit: int) -> Any:
        """An instance at this state, from the beginning of its episode."""
        instance, moment = self._begin(seed)
        for time, action in enumerate(actions, 1):
            moment = self._moved(instance, moment.digest, action, time, limit)
        self.num_replayed += len(actions)
        if moment.digest != digest:
            raise Unrepeatable(
                f"the episode with seed {seed} differs when it is played again with the same {len(actions)} actions, "
                "or its code has changed since; reset(seed=...) must determine it: draw all random numbers from "
                "self.np_random, and keep nothing from earlier episodes"
            )
        return instance


def find_mask(instance: Any, info: Any) -> tuple[Any, str] | None:
    """The mask of legal actions that an instance or an info has, and its name; None if there is none."""
    try:  # a wrapper of gymnasium passes attributes on only in this way
        method = getattr(instance, "get_wrapper_attr", instance.__getattribute__)("action_masks")
    except AttributeError:
        return (info["action_mask"], 'info["action_mask"]') if "action_mask" in (info or ()) else None
    if not callable(method):
        raise ConfigError("action_masks is a value; write a method, def action_masks(self)")
    return method(), "action_masks()"


def _digest(*parts: Any) -> bytes:
    parts = (part if isinstance(part, bytes) else part.tobytes() for part in parts)
    return hashlib.blake2b(b"".join(parts), digest_size=8).digest()

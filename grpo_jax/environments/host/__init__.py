"""Environments that run on the host in Python, such as gymnasium's, with the interface of gymnax.

A compiled program calls the host for every reset and step, and must be free to repeat, drop or reorder the calls and to
copy states. An episode of a seeded environment is a function of its seed and its actions, so these are the state here;
`Episodes` finds the instance that has reached it.
"""

import contextlib
import copy
import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.environments.casting import as_values
from grpo_jax.environments.host.episodes import Episodes, Moment, Unrepeatable, find_mask
from grpo_jax.environments.parameters import Timed
from grpo_jax.environments.spaces import host_actions, observed_spaces
from grpo_jax.errors import ConfigError, HostError, with_own_frames
from grpo_jax.host_calls import call_host
from grpo_jax.types import PyTree

NUM_TRIED = 32
"""The most steps that are played again before a run."""

_DIGEST = jax.ShapeDtypeStruct((2,), jnp.uint32)


class HostState(NamedTuple):
    """A state of an episode: all that is needed to reach it again."""

    seed: jax.Array  # int32
    actions: jax.Array  # [max_steps_in_episode, ...] all so far
    time: jax.Array  # int32, their number
    digest: jax.Array  # uint32 [2], identifies the state
    ended: jax.Array  # bool: later steps change nothing
    mask: jax.Array | None = None  # bool [num_actions], the legal ones; None: the environment has no masks


class HostEnvironment(Timed):
    """An environment with gymnasium's interface, in Python or C++, on the host.

        Config(environment=HostEnvironment(MyEnv, max_steps=200))

    `reset(seed=s)` must determine the whole episode, given the actions. A replay that differs is an error. Masks of
    legal actions are those of `action_masks()`, as in sb3-contrib, or of `info["action_mask"]`.

    Args:
      make: a function that makes a new instance, called about once for each parallel environment.
      name: for messages and files; by default the name of `make`.
      max_steps: the default of the parameter `max_steps_in_episode`; None: the limit in the instance's `spec`.
      max_kept: the most instances in mid-episode. With more states than that (rows × `num_envs`) the results are the
        same, but each step replays its episode.

    Raises:
      ConfigError: for spaces that are not supported, and for what the first steps show: another interface, observations
        that are not in their space, instances that share a simulator.

    Warns if an episode differs after some steps when it is played again. The run can then not be resumed.
    """

    on_host = True

    def __init__(
        self, make: Callable[[], Any], *, name: str | None = None, max_steps: int | None = None, max_kept: int = 1024
    ):
        if not callable(make) or of_gymnasium(make) and not isinstance(make, type):
            _check_parts(make, type(make).__name__)
            own, spec = type(make).__name__, getattr(make, "spec", None)
            write = f"environment='gymnasium:{spec.id}'" if spec else f"HostEnvironment({own}, max_steps=30)"
            raise ConfigError(
                f"this {own} is one instance, and each of the parallel environments needs its own: write {write}, or "
                f"HostEnvironment(lambda: {own}(...), max_steps=30) for what has arguments or wrappers"
            )
        self.name, self._make = name or getattr(make, "__name__", type(make).__name__), make
        first, second = make(), make()
        _check_parts(first, self.name)
        self.action_space, self.observation_space = lambda _: first.action_space, lambda _: first.observation_space
        observed = observed_spaces(first.observation_space, self.name)
        self._action, decode = host_actions(first.action_space, self.name)
        limit = max_steps or getattr(getattr(first, "spec", None), "max_episode_steps", None) or 0
        super().__init__(None, limit)  # without any limit the door refuses 0, unless env_params has one
        mask = None
        with self._naming():
            _, info = as_values(first.reset(seed=0), ("observation", "info"), "reset")
            if find_mask(first, info):
                if decode is not int:
                    raise ConfigError("it has masks of legal actions, which only Discrete actions can have")
                self.action_mask = lambda state, params: state.mask
                mask = jax.ShapeDtypeStruct((int(first.action_space.n),), bool)
            self.episodes = Episodes(make, (first, second), observed, decode, max_kept, mask)
            self._try_out(copy.deepcopy(first.action_space), limit)
        self._leaves, self._structure = jax.tree.flatten((self.episodes.given, mask))
        self._moved = *self._leaves, jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), bool)

    def _try_out(self, space, limit):
        """Raises ConfigError for what the first steps show; warns if only a replay of them differs, as PPO has none."""
        space.seed(0)

        def choose(*legal):
            return np.asarray(space.sample(*(mask.astype(np.int8) for mask in legal)), self._action.dtype)

        self.episodes.try_out(choose, 0, limit)
        try:
            self.episodes.try_out(choose, min(NUM_TRIED, limit or NUM_TRIED), limit)
        except Unrepeatable as error:
            effect = "as it is, a run cannot be resumed, and groups, which replay episodes, end with an error"
            warnings.warn(f"environment {self.name!r} on the host: {error}; {effect}", stacklevel=3)

    @property
    def identity(self) -> tuple:
        return self.name, self._make, self.default_params  # what a resumed run compares

    def reset_env(self, key: jax.Array, params: Any) -> tuple[PyTree, HostState]:
        """As in gymnax. The seed is uniform in [0, 2^31 - 1)."""
        seed = jax.random.randint(key, (), 0, jnp.iinfo(jnp.int32).max)
        starts = functools.partial(self._arrays, lambda seed: self.episodes.start(int(seed)))
        digest, *leaves = call_host(starts, (_DIGEST, *self._leaves), seed)
        observation, mask = self._structure.unflatten(leaves)
        shape = (params.max_steps_in_episode, *self._action.shape)
        state = HostState(seed, jnp.zeros(shape, self._action.dtype), jnp.int32(0), digest, jnp.bool_(False), mask)
        return observation, state

    def step_env(self, key: jax.Array, state: HostState, action: jax.Array, params: Any) -> tuple:
        """As in gymnax. All randomness comes from the seed. After the end of an episode the host does nothing."""
        action = jnp.asarray(action, self._action.dtype)
        digest, *leaves, reward, terminated = call_host(self._steps, (_DIGEST, *self._moved), state, action)
        time = state.time + 1
        ended = state.ended | terminated | (time >= params.max_steps_in_episode)
        observation, mask = self._structure.unflatten(leaves)
        after = HostState(state.seed, state.actions.at[state.time].set(action), time, digest, ended, mask)
        return observation, after, reward, terminated, {}

    def _steps(self, state, action):
        idle = Moment(bytes(8), [np.zeros(each.shape, each.dtype) for each in self._moved])

        def step(seed, actions, time, digest, ended, action):
            state = int(seed), digest.tobytes(), actions[:time]
            return idle if ended else self.episodes.step(*state, action, len(actions))

        return self._arrays(step, *state[:5], action)

    def _arrays(self, function, *columns):
        """The digests and each array of the moments that a function gives for each row of these columns."""
        shape = np.shape(columns[0])
        rows = [np.asarray(x).reshape((-1, *np.shape(x)[len(shape) :])) for x in columns]
        with self._naming():
            moments = self.episodes.batch(function, list(zip(*rows, strict=True)))
        digests = np.frombuffer(b"".join(moment.digest for moment in moments), np.uint32)
        stacks = map(np.stack, zip(*(moment.arrays for moment in moments), strict=True))
        return (digests.reshape((*shape, 2)), *(stack.reshape((*shape, *stack.shape[1:])) for stack in stacks))

    @contextlib.contextmanager
    def _naming(self):
        """Errors name the environment; those of the user's own code also keep its part of the traceback."""
        where = f"environment {self.name!r} on the host"
        try:
            yield
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        except Exception as error:
            raise HostError(f"{where}: {type(error).__name__}: {error}") from with_own_frames(error)


def of_gymnasium(found: Any) -> bool:
    """Whether this is a class with gymnasium's or gym's interface, or an instance of one."""
    kind = found if isinstance(found, type) else type(found)
    return any(each.__module__.partition(".")[0] in ("gymnasium", "gym") for each in kind.__mro__)


def _check_parts(made: Any, name: str) -> None:
    """Raises ConfigError if this is not one environment with gymnasium's interface."""
    missing = [part for part in ("observation_space", "action_space", "reset", "step") if not hasattr(made, part)]
    if hasattr(made, "single_action_space"):
        raise ConfigError(f"{name!r} is a vector of environments; give the class of one of them, as num_envs copies it")
    if missing:
        raise ConfigError(f"{name!r} has no {' and no '.join(missing)}; set it in its class, as gymnasium.Env says")


class Gymnasium(HostEnvironment):
    """An environment of gymnasium, such as "gymnasium:CartPole-v1", or "gymnasium:ale_py:ALE/Pong-v5" of a package."""

    def __init__(self, name: str):
        import gymnasium

        module, _, own = name.rpartition(":")
        # gymnasium's own wrapper for the time limit would truncate before a longer max_steps_in_episode.
        make = functools.partial(gymnasium.make, name, max_episode_steps=-1, disable_env_checker=True)
        try:
            importlib.import_module(module or "gymnasium")  # which registers it
            super().__init__(make, name=f"gymnasium:{name}", max_steps=gymnasium.spec(own).max_episode_steps)
        except (gymnasium.error.Error, ImportError) as error:
            raise ConfigError(f"gymnasium cannot make {name!r}: {error}") from error

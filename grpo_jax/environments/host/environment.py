"""Environments on the host with the interface of gymnax.

A compiled program calls the host for every reset and step, through callbacks that must be pure: XLA may repeat them,
leave them out or reorder them, rollouts draw start states that no episode begins with, groups copy states, and a
checkpoint has arrays only. A state that a simulator keeps to itself allows none of this. But an episode of a seeded
environment is a function of its seed and its actions, so these are the state here. `Episodes` finds the simulator that
has reached a state, or replays the episode in another one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.environments.host.episodes import DIGEST_BYTES, Episodes, Moment, Request
from grpo_jax.environments.host.gymnasium_interface import Instances, Simulators, action_decoder, observation_leaves
from grpo_jax.environments.parameters import TimeLimit
from grpo_jax.environments.spaces import ActionSpace
from grpo_jax.host_calls import call_host
from grpo_jax.types import PyTree

_DIGEST = jax.ShapeDtypeStruct((DIGEST_BYTES // 4,), jnp.uint32)


class HostState(NamedTuple):
    """A state of an episode: all that is needed to reach it again."""

    seed: jax.Array  # int32
    actions: jax.Array  # [max_steps_in_episode, ...] all so far
    time: jax.Array  # int32, their number
    digest: jax.Array  # uint32 [2], identifies the state
    ended: jax.Array  # bool: later steps change nothing


class HostEnvironment:
    """An environment with gymnasium's interface, in Python or C++, on the host.

        Config(environment=HostEnvironment(MyEnv, max_steps=200))

    `reset(seed=s)` must determine the whole episode, given the actions. A replay that differs is an error.

    Args:
      make: a function that makes an instance, called about once for each parallel environment; or `Simulators`.
      name: for messages and files; by default the name of `make`.
      max_steps: the default of the parameter `max_steps_in_episode`; None: the limit in the instance's `spec`.
      max_kept: the most instances in mid-episode. With more states than that (rows × `num_envs`) the results are the
        same, but each step replays its episode.

    Raises:
      ConfigError: for spaces that are not supported.
    """

    on_host = True

    def __init__(
        self,
        make: Callable[[], Any] | Simulators,
        *,
        name: str | None = None,
        max_steps: int | None = None,
        max_kept: int = 1024,
    ):
        simulators = make if hasattr(make, "first_observations") else Instances(make)
        self.name = name or getattr(make, "__name__", type(make).__name__)
        self._make = make
        # Without any limit the adapter refuses 0, unless env_params has another.
        self.default_params = TimeLimit(max_steps or simulators.max_steps or 0)
        self._observation_space = simulators.observation_space
        observation, leaves = observation_leaves(simulators.observation_space)
        self._leaves, self._structure = jax.tree.flatten(observation)
        self._action_space, self._action, decode = action_decoder(simulators.action_space)
        self.episodes = Episodes(simulators, leaves, decode, max_kept)

    @property
    def identity(self) -> tuple:
        """What a resumed run compares; not the episodes that it keeps."""
        return self.name, self._make, self.default_params

    def action_space(self, params: Any) -> ActionSpace:
        return self._action_space

    def observation_space(self, params: Any) -> Any:
        """As in gymnax: gymnasium's space."""
        return self._observation_space

    def reset_env(self, key: jax.Array, params: Any) -> tuple[PyTree, HostState]:
        """As in gymnax. The seed is uniform in [0, 2^31 - 1)."""
        seed = jax.random.randint(key, (), 0, jnp.iinfo(jnp.int32).max)
        results = (*self._leaves, _DIGEST)
        *leaves, digest = call_host(self._starts, results, seed)
        shape = (params.max_steps_in_episode, *self._action.shape)
        state = HostState(seed, jnp.zeros(shape, self._action.dtype), jnp.int32(0), digest, jnp.bool_(False))
        return self._structure.unflatten(leaves), state

    def step_env(self, key: jax.Array, state: HostState, action: jax.Array, params: Any) -> tuple:
        """As in gymnax. All randomness comes from the seed. After the end of an episode the host does nothing."""
        action = jnp.asarray(action, self._action.dtype)
        flag, real = jax.ShapeDtypeStruct((), bool), jax.ShapeDtypeStruct((), jnp.float32)
        results = (*self._leaves, _DIGEST, real, flag)
        *leaves, digest, reward, terminated = call_host(self._steps, results, state, action)
        time = state.time + 1
        ended = state.ended | terminated | (time >= params.max_steps_in_episode)
        after = HostState(state.seed, state.actions.at[state.time].set(action), time, digest, ended)
        return self._structure.unflatten(leaves), after, reward, terminated, {}

    def is_truncated(self, state: HostState, params: Any) -> jax.Array:
        return state.time >= params.max_steps_in_episode

    def _starts(self, seed):
        seed = np.asarray(seed)
        moments = self._on_host(self.episodes.starts, seed.reshape(-1).tolist())
        return self._stacked(moments, seed.shape)[:-2]

    def _steps(self, state, action):
        state, action = jax.tree.map(np.asarray, (state, action))
        shape = state.seed.shape
        state, action = jax.tree.map(lambda x: x.reshape((-1, *x.shape[len(shape) :])), (state, action))
        limit = state.actions.shape[1]
        playing = np.flatnonzero(~state.ended).tolist()
        seeds, times = state.seed.tolist(), state.time.tolist()
        requests = [
            Request(seeds[i], state.digest[i].tobytes(), state.actions[i, : times[i]], action[i]) for i in playing
        ]
        idle = Moment(bytes(DIGEST_BYTES), [np.zeros(leaf.shape, leaf.dtype) for leaf in self._leaves])
        moments = [idle] * len(seeds)
        for i, moment in zip(playing, self._on_host(self.episodes.steps, requests, limit), strict=True):
            moments[i] = moment
        return self._stacked(moments, shape)

    def _stacked(self, moments, shape):
        """Arrays of these moments: of the observation, the digests, rewards and terminations."""
        digests, observations, rewards, terminated = zip(*moments, strict=True)
        digests = np.frombuffer(b"".join(digests), np.uint32).reshape(-1, *_DIGEST.shape)
        arrays = [np.stack(leaves) for leaves in zip(*observations, strict=True)]
        arrays += [digests, np.array(rewards, np.float32), np.array(terminated, bool)]
        return tuple(array.reshape((*shape, *array.shape[1:])) for array in arrays)

    def _on_host(self, function, *arguments):
        try:
            return function(*arguments)
        except Exception as error:
            raise RuntimeError(f"environment {self.name!r} on the host: {type(error).__name__}: {error}") from error

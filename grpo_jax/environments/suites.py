"""Environments named "suite:name": token tasks, and brax, craftax and pgx, which need the extra `envs`."""

import dataclasses
import warnings
from typing import Any

import jax
import numpy as np
from flax import struct

from grpo_jax.environments.spaces import Box, Discrete
from grpo_jax.environments.tokens import make_task
from grpo_jax.errors import ConfigError, nearest


@struct.dataclass
class TimedState:
    """The state of an environment that does not count its own steps, and the count."""

    inner: Any
    time: int


@struct.dataclass
class TimeLimit:
    """The only parameter of an environment with a `TimedState`."""

    max_steps_in_episode: int


class _Timed:
    """Base class of environments with a `TimedState`."""

    def __init__(self, inner: Any, max_steps: int):
        self.inner, self.default_params = inner, TimeLimit(max_steps)

    def is_truncated(self, state, params):
        return state.time >= params.max_steps_in_episode


class Brax(_Timed):
    """A brax task, such as "brax:ant", with episodes of 1000 steps as in brax's own training."""

    def __init__(self, name: str):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # brax recommends MJX's own suites
            from brax import envs

            _check_known("brax", name, envs._envs)
            super().__init__(envs.get_environment(name), 1000)
        self.name = f"brax:{name}"

    def action_space(self, params):
        """Actions in [-1, 1], like those of brax's own policies."""
        size = self.inner.action_size
        return Box((-1.0,) * size, (1.0,) * size)

    def reset_env(self, key, params):
        """As in gymnax."""
        inner = self.inner.reset(key)
        return inner.obs, TimedState(inner, 0)

    def step_env(self, key, state, action, params):
        """As in gymnax; brax's dynamics are deterministic."""
        before = jax.tree.map(lambda leaf: leaf, state.inner)  # a copy, as brax modifies dictionaries of the state
        inner = self.inner.step(before, action)
        return inner.obs, TimedState(inner, state.time + 1), inner.reward, inner.done, {}


class Pgx(_Timed):
    """A single-player game, such as "pgx:2048" or "pgx:minatar-breakout", truncated at 2000 steps."""

    def __init__(self, name: str):
        import pgx

        _check_known("pgx", name, pgx.available_envs())
        inner = pgx.make(name)
        if inner.num_players != 1:
            raise ConfigError(f"'pgx:{name}' is a game of {inner.num_players} players; use a single-player game")
        super().__init__(inner, 2000)
        if not name.startswith("minatar"):  # in MinAtar every action is legal
            self.action_mask = lambda state, params: state.inner.legal_action_mask

    def action_space(self, params):
        """As in gymnax."""
        return Discrete(self.inner.num_actions)

    def reset_env(self, key, params):
        """As in gymnax."""
        inner = self.inner.init(key)
        return inner.observation, TimedState(inner, 0)

    def step_env(self, key, state, action, params):
        """As in gymnax."""
        inner = self.inner.step(state.inner, action, key)
        return inner.observation, TimedState(inner, state.time + 1), inner.rewards[0], inner.terminated, {}


class Craftax:
    """A Craftax game, such as "craftax:Craftax-Classic-Symbolic-v1". The time limit truncates, death terminates."""

    NAMES = tuple(f"Craftax-{kind}-v1" for kind in ("Symbolic", "Pixels", "Classic-Symbolic", "Classic-Pixels"))

    def __init__(self, name: str):
        from craftax.craftax_env import make_craftax_env_from_name

        _check_known("craftax", name, self.NAMES)
        self.name = f"craftax:{name}"
        inner = make_craftax_env_from_name(name, auto_reset=False)
        self.reset_env, self.step_env, self.action_space = inner.reset_env, inner.step_env, inner.action_space
        params = inner.default_params
        limited = [("max_steps_in_episode", int, params.max_timesteps)]
        limited = dataclasses.make_dataclass("CraftaxParams", limited, bases=(type(params),), frozen=True)
        # Craftax's own time limit terminates, so it is moved out of reach.
        self.default_params = limited(max_timesteps=np.iinfo(np.int32).max)

    def is_truncated(self, state, params):
        """As in gymnax."""
        return state.timestep >= params.max_steps_in_episode


SUITES = {"brax": Brax, "craftax": Craftax, "pgx": Pgx, "tokens": make_task}
"""Functions from the name after the colon to an environment, by the suite before the colon."""


def from_suite(suite: str, name: str) -> Any:
    """An object with gymnax's interface, or a token task.

    Raises:
      ConfigError: if the suite is not installed or has no such environment.
    """
    try:
        return SUITES[suite](name)
    except ImportError as error:
        raise ConfigError(f"'{suite}:{name}' needs {suite}: pip install 'grpo-jax[envs]' ({error})") from error


def _check_known(suite: str, name: str, known) -> None:
    if name not in known:
        raise ConfigError(f"{suite} has no environment {name!r}: {nearest(name, known)}")

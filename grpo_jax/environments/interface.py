"""The parts of an object with gymnax's interface, and wrappers as environments that begin no new episode themselves.

gymnax's wrappers forward what they do not define to the environment inside, and define `reset` and `step`; gymnax's own
`step` resets at the end of an episode. `opened` puts an environment inside whose `step` does not.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from grpo_jax.environments.casting import as_values
from grpo_jax.environments.parameters import LIMIT, cast_parameters
from grpo_jax.errors import ConfigError, HostError, in_short, with_own_frames
from grpo_jax.types import PyTree

_PARTS = ("default_params", "action_space", "reset_env", "step_env", "is_truncated")
SIX = ("observation", "state", "reward", "terminated", "truncated", "info")
_NOWHERE = 1000


def env_name(env: Any) -> str:
    """The name of an object with gymnax's interface; a wrapper's has that of the environment inside in brackets."""
    if inspect.getattr_static(env, "name", None) is not None:
        return env.name
    inner = _inside(env)
    return type(env).__name__ + (f"({env_name(inner[1])})" if inner else "")


def overridden_params(env: Any, overrides: Mapping[str, Any]) -> Any:
    """The default parameters of an object with gymnax's interface, with some fields overridden."""
    missing = [part for part in _PARTS if not hasattr(env, part)]
    if missing:
        raise ConfigError(
            f"environment={env!r} does not have gymnax's interface: it lacks {', '.join(missing)}; use a name such as "
            "'CartPole-v1', or an object with the interface that `grpo-jax docs environments` describes"
        )
    params, name = env.default_params, env_name(env)
    fields = dataclasses.fields(params) if dataclasses.is_dataclass(params) else ()
    defaults = {field.name: getattr(params, field.name) for field in fields}
    if LIMIT not in defaults:
        raise ConfigError(f"default_params of {name!r} must be a dataclass with a field {LIMIT}")
    with jax.ensure_compile_time_eval():  # a cached environment must hold no tracer
        return dataclasses.replace(params, **cast_parameters(overrides, defaults, name))


class Whole:
    """An environment with gymnax's `reset` and `step`, of which `step` begins no new episode."""

    def __init__(self, env: Any):
        self._env = env

    def __getattr__(self, part: str) -> Any:
        return getattr(self._env, part)

    def reset(self, key: jax.Array, params: Any = None) -> tuple:
        """Observation and state."""
        returned = self._env.reset_env(key, self._env.default_params if params is None else params)
        return as_values(returned, SIX[:2], f"reset_env of {env_name(self._env)!r}")

    def step(self, key: jax.Array, state: PyTree, action: Any, params: Any = None) -> tuple:
        """The six values of gymnax's `step`."""
        params, name = self._env.default_params if params is None else params, env_name(self._env)
        returned = self._env.step_env(key, state, action, params)
        observation, state, reward, ended, info = as_values(returned, (*SIX[:4], SIX[5]), f"step_env of {name!r}")
        with naming("is_truncated", name):
            cut = self._env.is_truncated(state, params)
        if isinstance(info, Mapping):
            info = {**info, "terminated": ended, "truncated": cut, "final_observation": observation}
        return observation, state, reward, ended, cut, info


def opened(env: Any) -> Any:
    """The environment with `reset` and `step` that begin no new episode: a `Whole`, or a wrapper around one.

    Raises:
      ConfigError: the class overrides `step` or `reset` of an environment, which nothing calls; or its `step_env` goes
        round a wrapper's `step`.
    """
    inner = _inside(env)
    overridden = [part for part in ("step", "reset") if _depth(env, part) < _depth(env, f"{part}_env")]
    if not overridden:
        if inner and not isinstance(opened(inner[1]), Whole):
            raise ConfigError(f"{env_name(env)} would go round {env_name(inner[1])}; define reset and step")
        return Whole(env)
    if inner is None or min(_depth(env, "step_env"), _depth(env, "reset_env")) < _NOWHERE:
        raise ConfigError(
            f"{type(env).__name__} overrides {overridden[0]}, which is not called, as rollouts reset environments "
            f"themselves; override {overridden[0]}_env"
        )
    made = object.__new__(type(env))
    for name, value in (vars(env) | {inner[0]: opened(inner[1])}).items():
        object.__setattr__(made, name, value)
    return made


def _inside(env: Any) -> tuple[str, Any] | None:
    """The attribute of a wrapper that holds an environment, and this; None if there is none."""
    for name, value in getattr(env, "__dict__", {}).items():
        is_environment = all(hasattr(value, part) for part in ("reset_env", "step_env")) and not isinstance(value, type)
        parts = getattr(value, "__dict__", {}).values()
        if is_environment and not any(part is env for part in parts):  # a helper around it
            return name, value
    return None


def _depth(env: Any, part: str) -> int:
    """How far away it is defined: 0 by the object, 1 by its class ...; gymnax's base class does not count."""
    own = {} if part in ("step", "reset") else getattr(env, "__dict__", {})
    base = ("gymnax.environments.environment", "Environment")
    where = [own, *(vars(each) for each in type(env).__mro__ if (each.__module__, each.__name__) != base)]
    return next((depth for depth, names in enumerate(where) if part in names), _NOWHERE)


@contextlib.contextmanager
def naming(part: str, name: str) -> Iterator[None]:
    """Errors in a part of an environment become a ConfigError that names both; errors of the host stay as they are."""
    try:
        yield
    except (ConfigError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        what = in_short(error).splitlines()[0]
        raise HostError(f"{part} of {name!r}: {type(error).__name__}: {what}") from with_own_frames(error)

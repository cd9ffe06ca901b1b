"""The parts of an object with gymnax's interface, looked up where they are defined.

gymnax's wrappers forward what they do not define to the environment inside, and define `reset` and `step`, which reset
by themselves. `opened` makes an environment of such a wrapper that does what the wrapper does.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from grpo_jax.environments.casting import as_values
from grpo_jax.environments.parameters import LIMIT, cast_parameter
from grpo_jax.errors import ConfigError, first_line, nearest
from grpo_jax.types import PyTree

_PARTS = ("default_params", "action_space", "reset_env", "step_env", "is_truncated")
SIX = ("observation", "state", "reward", "terminated", "truncated", "info")
_INSTEAD = {"step": "step_env", "reset": "reset_env"}
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
    for part in _PARTS[1:]:
        if not callable(getattr(env, part)):
            raise ConfigError(f"{part} of {env_name(env)!r} is {getattr(env, part)!r}; make a method of it")
    params = env.default_params
    fields = {field.name for field in dataclasses.fields(params)} if dataclasses.is_dataclass(params) else set()
    if LIMIT not in fields:
        raise ConfigError(f"default_params of {env_name(env)!r} must be a dataclass with a field {LIMIT}")
    for field in overrides:
        if field not in fields:
            raise ConfigError(f"environment {env_name(env)!r} has no parameter {field!r}: {nearest(field, fields)}")
    with jax.ensure_compile_time_eval():  # a cached environment must hold no tracer
        return dataclasses.replace(
            params, **{k: cast_parameter(v, getattr(params, k), k) for k, v in overrides.items()}
        )


def opened(env: Any) -> Any:
    """The object itself, or for a wrapper of `reset` and `step` an environment that steps through it without resets.

    Raises:
      ConfigError: the class overrides `step` or `reset` of an environment, which nothing calls.
    """
    inner = _inside(env)
    overridden = [part for part, instead in _INSTEAD.items() if _depth(env, part) < _depth(env, instead)]
    has_parts = any(_defines(env, part) for part in _INSTEAD.values())
    if overridden and (has_parts or (inner is None and hasattr(env, "step_env"))):
        raise ConfigError(
            f"{type(env).__name__} overrides {overridden[0]}, which is not called, as rollouts reset environments "
            f"themselves; override {_INSTEAD[overridden[0]]}"
        )
    if inner is None:
        return env
    environment = opened(inner[1])
    if overridden:
        inside = environment if _steps_whole(environment) else _derived(environment, {}, reset=_reset, step=_step)
        parts = {"name": env_name(env), "reset_env": lambda self, key, params: self.reset(key, params)}
        return _derived(env, {inner[0]: inside}, **parts, steps_whole=True)
    if environment is not inner[1]:
        raise ConfigError(f"{env_name(env)} would go round {env_name(environment)}; define reset and step")
    return env


def _steps_whole(env: Any) -> bool:
    """Whether it is an opened wrapper, whose `reset` and `step` begin no new episode."""
    return getattr(type(env), "steps_whole", False)


def _derived(env: Any, attributes: Mapping[str, Any], **parts: Any) -> Any:
    """A copy of the object with other attributes, and with these parts in its class."""
    kind = type(env)
    made = object.__new__(type(kind.__name__, (kind,), {"__module__": kind.__module__, **parts}))
    vars(made).update(vars(env) | attributes)
    return made


def _reset(self: Any, key: jax.Array, params: Any = None) -> tuple:
    return self.reset_env(key, self.default_params if params is None else params)


def _step(self: Any, key: jax.Array, state: PyTree, action: Any, params: Any = None) -> tuple:
    """gymnax's `step` without the new episode."""
    params = self.default_params if params is None else params
    observation, *others, ended, cut, info = stepped(self, key, state, action, params)
    added = {"terminated": ended, "truncated": cut, "final_observation": observation}
    return observation, *others, ended, cut, {**(info or {}), **added}


def stepped(env: Any, key: jax.Array, state: PyTree, action: Any, params: Any) -> tuple:
    """The six values of a step without a reset: observation, state, reward, terminated, truncated, info."""
    if _steps_whole(env):
        return as_values(env.step(key, state, action, params), SIX, f"step of {env_name(env)!r}")
    returned, name = env.step_env(key, state, action, params), env_name(env)
    observation, state, *ends, info = as_values(returned, (*SIX[:4], SIX[5]), f"step_env of {name!r}")
    with naming("is_truncated", name):
        return observation, state, *ends, env.is_truncated(state, params), info


@contextlib.contextmanager
def naming(part: str, name: str) -> Iterator[None]:
    """Errors in a part of an environment become a ConfigError that names both; errors of the host stay as they are."""
    try:
        yield
    except (ConfigError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        advice = "; its arguments are traced: write jnp.where or jax.lax.cond for `if`, and jnp for numpy"
        advice = advice if isinstance(error, jax.errors.JAXTypeError) else ""
        raise ConfigError(f"{part} of {name!r}: {type(error).__name__}: {first_line(error)}{advice}") from error


def _inside(env: Any, levels: int = 8) -> tuple[str, Any] | None:
    """The attribute of a wrapper that holds an environment, and this; None if there is none."""
    held = getattr(env, "__dict__", {}).items()
    return next(((name, value) for name, value in held if _is_environment(value, levels)), None)


def _is_environment(value: Any, levels: int) -> bool:
    if all(_defines(value, part) for part in _INSTEAD.values()):
        return True
    is_wrapper = hasattr(value, "step_env") or any(_defines(value, part) for part in (*_INSTEAD, *_INSTEAD.values()))
    return levels > 0 and is_wrapper and _inside(value, levels - 1) is not None


def _defines(env: Any, part: str) -> bool:
    return _depth(env, part) < _NOWHERE


def _depth(env: Any, part: str) -> int:
    """How far away it is defined: 0 by the object, 1 by its class ...; gymnax's base class does not count."""
    own = {} if part in _INSTEAD else getattr(env, "__dict__", {})
    where = [own, *(vars(each) for each in type(env).__mro__ if not _is_base(each))]
    return next((depth for depth, names in enumerate(where) if part in names), _NOWHERE)


def _is_base(each: type) -> bool:
    return (each.__module__, each.__name__) == ("gymnax.environments.environment", "Environment")

"""Environments by name, by import path or as they are."""

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from grpo_jax.environments.environment import Environment
from grpo_jax.environments.gymnax_adapter import from_gymnax, registered
from grpo_jax.environments.suites import SUITES, from_suite
from grpo_jax.environments.tokens import Task, token_environment
from grpo_jax.errors import ConfigError, nearest


def make_environment(environment: str | Any, params: Mapping[str, Any] | None = None) -> Environment:
    """The pure functions of an environment.

    Args:
      environment: see `environment_object`; or a value of `Environment`, which is taken as it is.
      params: fields of the environment's parameters to override, such as `{"max_steps_in_episode": 200}`.

    Raises:
      ConfigError: an unknown name or parameter (with the nearest known ones), or an object that will not do.
    """
    if isinstance(environment, Environment):
        if params:
            raise ConfigError(f"env_params override those of a name; give {environment.name!r} other params itself")
        return environment
    found = environment_object(environment)
    made = token_environment(found, params or {}) if isinstance(found, Task) else from_gymnax(found, params or {})
    # What was asked for: gymnax's DiscountingChain-bsuite, for one, calls itself otherwise.
    return made._replace(name=environment) if isinstance(environment, str) else made


def environment_object(environment: str | Any) -> Any:
    """An object with gymnax's interface, or a token task.

    Args:
      environment: a name in gymnax, such as "CartPole-v1"; one in another suite, such as "brax:ant"; one of your own,
        "package.module:Name", an object or what makes one without arguments; or the object itself.
    """
    if not isinstance(environment, str):
        return environment
    before, colon, after = environment.partition(":")
    if not colon:
        return registered(environment)
    return from_suite(before, after) if before in SUITES else _imported(before, after)


def _imported(module: str, name: str) -> Any:
    where = f"environment '{module}:{name}'"
    try:
        if not all(part.isidentifier() for part in module.split(".")):
            raise ImportError("this is no module's name")
        found = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{where}: cannot import {module!r} ({error}); the part before the colon is a module on Python's path or "
            f"one of the suites {', '.join(SUITES)}"
        ) from error
    if not hasattr(found, name):
        known = [public for public in vars(found) if not public.startswith("_")]
        raise ConfigError(f"{where}: {module!r} has no {name!r}: {nearest(name, known)}")
    found = getattr(found, name)
    if isinstance(found, type) or not (hasattr(found, "step_env") or isinstance(found, Task)):
        try:
            inspect.signature(found).bind()
        except TypeError as error:
            raise ConfigError(f"{where}: cannot make one without arguments ({error}); name what can") from error
        found = found()
    return found

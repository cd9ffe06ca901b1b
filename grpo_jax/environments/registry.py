"""Finds environments by name or import path."""

import functools
import importlib
import inspect
import sys
import types
from collections.abc import Mapping
from typing import Any

import jax

from grpo_jax.environments.door import from_gymnax
from grpo_jax.environments.environment import Environment
from grpo_jax.environments.host import HostEnvironment, of_gymnasium
from grpo_jax.environments.parameters import static_parameters
from grpo_jax.environments.suites import SUITES, from_suite
from grpo_jax.environments.tokens import Task, token_environment
from grpo_jax.errors import ConfigError, nearest
from grpo_jax.importing import import_object


def make_environment(environment: str | Any, params: Mapping[str, Any] | None = None) -> Environment:
    """The pure functions of an environment.

    Args:
      environment: a name, a path or an object (see `environment_object`); an `Environment` is returned unchanged.
      params: fields of the environment's parameters to override, such as `{"max_steps_in_episode": 200}`.

    Raises:
      ConfigError: for an unknown name or parameter (names the nearest ones), or an object without the interface.
    """
    params = params or {}
    if isinstance(environment, Environment):
        if params:
            raise ConfigError(f"env_params cannot override those of an Environment; change {environment.name!r} itself")
        return environment
    if isinstance(environment, str) and ":" not in environment:
        return _of_gymnax(environment, static_parameters(params), jax.config.jax_enable_x64)
    return _made(environment, params)


def _made(environment: str | Any, params: Mapping[str, Any]) -> Environment:
    found = environment_object(environment)
    made = token_environment(found, params) if isinstance(found, Task) else from_gymnax(found, params)
    # The requested name; gymnax's own differs, for example for DiscountingChain-bsuite.
    return made._replace(name=environment) if isinstance(environment, str) else made


@functools.lru_cache
def _of_gymnax(name: str, params: tuple[tuple[str, Any], ...], wide: bool) -> Environment:
    """The environment of a name in gymnax, traced once; `wide`: with dtypes of 64 bits."""
    return _made(name, dict(params))


def environment_object(environment: str | Any) -> Any:
    """An object with gymnax's interface, or a token task.

    Args:
      environment: a name in gymnax, such as "CartPole-v1"; a name in another suite, such as "brax:ant"; a path
        "package.module:Name" of an object, or of a class or function that makes one without arguments; or the object.
        Classes and functions that make environments of gymnasium run on the host.
    """
    if isinstance(environment, type) and not of_gymnasium(environment):
        raise ConfigError(f"environment={environment.__name__} is a class; write {environment.__name__}()")
    found = environment
    if isinstance(environment, str):
        source, colon, name = environment.partition(":")
        # Constructors compute with arrays, and compare them, also where a Config is made while a function is traced.
        with jax.ensure_compile_time_eval():
            if not colon:
                found = _registered(environment)
            else:
                found = from_suite(source, name) if source in SUITES else _imported(environment)
    return HostEnvironment(found) if of_gymnasium(found) else found  # an instance is refused


def _imported(path: str) -> Any:
    name = path.partition(":")[2]
    found = import_object(path, "environment", instead=f" or one of the suites {', '.join(SUITES)}")
    if isinstance(found, type) or not (hasattr(found, "step_env") or hasattr(found, "step") or isinstance(found, Task)):
        try:
            inspect.signature(found).bind()
        except (TypeError, ValueError) as error:  # ValueError: of builtins
            raise ConfigError(
                f"environment {path!r}: cannot call {name!r} without arguments ({error}); name an object, or a "
                "function without required arguments that makes one"
            ) from error
        if not (isinstance(found, type) and of_gymnasium(found)):
            made = found()
            return HostEnvironment(found) if of_gymnasium(made) else made
    return found


def gymnax_names() -> list[str]:
    """The names that gymnax registers."""
    return list(_gymnax().registered_envs)


def _registered(name: str) -> Any:
    if name not in (known := gymnax_names()):
        raise ConfigError(f"unknown environment {name!r}: {nearest(name, known)} (custom: 'package.module:Name')")
    if name == "Asterix-MinAtar":  # imported here, as gymnax takes its time
        return importlib.import_module("grpo_jax.environments.lean").Lean()
    try:
        return _gymnax().make(name)[0]
    except OSError as error:  # MNISTBandit's images
        raise ConfigError(f"{name!r} needs data that could not be downloaded: {error}") from error


class _Later(types.ModuleType):
    """A module that is imported when something of it is used."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


def _gymnax() -> types.ModuleType:
    """The package gymnax, without the seconds that its imports for pictures take."""
    if "gymnax" not in sys.modules:
        drawing = "matplotlib", "matplotlib.animation", "matplotlib.colors", "matplotlib.pyplot", "seaborn"
        later = {name: _Later(name) for name in drawing if name not in sys.modules}
        sys.modules.update(later)
        try:
            importlib.import_module("gymnax")
        finally:
            for name in later:
                del sys.modules[name]
    return importlib.import_module("gymnax")

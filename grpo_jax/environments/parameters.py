"""Values for the traced parameters of environments, such as physical constants and reward sizes."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from grpo_jax.environments.environment import Environment
from grpo_jax.errors import LARGEST_COUNT, ConfigError, nearest

EnvParams = Mapping[str, Any] | None
"""Values by name for an environment's traced parameters; parameters that are not named keep their default."""

LIMIT = "max_steps_in_episode"
"""Name of the parameter with the time limit. It is static, as the length of rollouts depends on it."""


@struct.dataclass
class TimeLimit:
    """The only parameter of an environment that has no others."""

    max_steps_in_episode: int


@struct.dataclass
class TimedState:
    """The state of an environment that does not count its own steps, and their number."""

    inner: Any
    time: int


class Timed:
    """Base class of environments with a `TimedState`, around those of other packages."""

    def __init__(self, inner: Any, max_steps: int):
        self.inner, self.default_params = inner, TimeLimit(max_steps)

    def is_truncated(self, state, params):
        """At the time limit."""
        return state.time >= params.max_steps_in_episode


def static_parameters(env_params: Any) -> tuple[tuple[str, Any], ...]:
    """Values for an environment's parameters as a `Config` keeps them: hashable, sorted by name, an array as tuples.

    Raises:
      ConfigError: they are no mapping, or a value cannot be hashed.
    """

    def plain(value):
        if isinstance(value, np.generic | np.ndarray | jax.Array):
            value = np.asarray(value).tolist()
        return tuple(map(plain, value)) if isinstance(value, list | tuple) else value

    try:
        static = tuple((name, plain(value)) for name, value in sorted(dict(env_params).items()))
        hash(static)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"env_params={env_params!r} must give numbers, texts or arrays by name, such as "
            f"{{'max_steps_in_episode': 200}} ({error})"
        ) from error
    return static


def cast_parameters(values: Mapping[str, Any], defaults: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The values of an environment's parameters with the types of their defaults."""
    for field in values:
        if field not in defaults:
            raise ConfigError(f"environment {name!r} has no parameter {field!r}: {nearest(field, defaults)}")
    return {field: cast_parameter(value, defaults[field], field) for field, value in values.items()}


def cast_parameter(value: Any, default: Any, field: str) -> Any:
    """The value with the default's type, as the command line parses every number as a float."""
    if isinstance(default, bool | int | float | str):
        kind = type(default)
        try:
            cast = kind(value)
        except (TypeError, ValueError, OverflowError):
            cast = math.nan
        of_its_kind = math.isfinite(cast) or cast == default if kind is float else cast == value  # nan equals nothing
        if isinstance(value, str) != isinstance(default, str) or not of_its_kind:
            words = {bool: "0 or 1", int: "a whole number", str: "a text"}.get(kind, "a finite number")
            raise ConfigError(f"{field}={value!r} must be {words}")
        if kind is int and not abs(cast) <= LARGEST_COUNT:
            raise ConfigError(f"{field}={value!r} must be a number of at most {LARGEST_COUNT}")
        return cast
    if not isinstance(default, (jax.Array, np.ndarray)):
        return value
    value = as_dtype(field, value, default.dtype)
    if value.shape != default.shape:
        raise ConfigError(f"{field} has shape {default.shape}, but was given shape {value.shape}")
    is_default = False if isinstance(default, jax.core.Tracer) else value == default
    if not (np.isfinite(value) | is_default).all():
        raise ConfigError(f"{field}={value} must have finite numbers")
    return value


def group_parameters(
    environment: Environment, env_params: EnvParams, num_groups: int, group_size: int
) -> dict[str, jax.Array]:
    """All traced parameters of every environment, each `[num_groups * group_size, ...]`; groups share their values.

    Args:
      environment: has the default values.
      env_params: for each name a value for all groups, or an array `[num_groups, ...]` with a value for each.
      num_groups, group_size: number of groups, and of environments in each.

    Raises:
      ConfigError: for a name that is not a traced parameter, or a value with the wrong shape or dtype.
    """
    given = _arrays(environment, env_params)

    def repeated(name, default):
        value, for_each = given.get(name, as_dtype(name, default, default.dtype)), (num_groups, *default.shape)
        if value.shape not in (default.shape, for_each):
            raise ConfigError(
                f"the environment parameter {name!r} has shape {value.shape}; use {default.shape} for all groups, or "
                f"{for_each} with a value for each"
            )
        return jnp.repeat(jnp.broadcast_to(value, for_each), group_size, axis=0)

    return {name: repeated(name, default) for name, default in environment.params.items()}


def row_parameters(environment: Environment, env_params: EnvParams, num_rows: int) -> dict[str, jax.Array]:
    """The given parameters with a leading axis of rows (seeds × hyperparameters), for `vmap` of `group_parameters`.

    Args:
      environment: has the shapes of the parameters.
      env_params: for each name a value for all rows, or an array `[num_rows]` or `[num_rows, num_groups]`.
      num_rows: number of rows.

    Raises:
      ConfigError: for a name that is not a traced parameter, or an array with another number of rows.
    """
    rows = _arrays(environment, env_params)
    for name, value in rows.items():
        if value.ndim == np.ndim(environment.params[name]):
            rows[name] = jnp.broadcast_to(value, (num_rows, *value.shape))
        elif value.shape[0] != num_rows:
            raise ConfigError(f"the environment parameter {name!r} has {value.shape[0]} rows instead of {num_rows}")
    return rows


def as_dtype(name: str, value: Any, dtype: Any) -> jax.Array:
    """A parameter's value as an array. It is a copy, since the train state that gets it may be donated.

    Raises:
      ConfigError: for a value that is not an array of numbers, or a real number where the parameter is an integer,
        as the conversion would truncate it.
    """
    try:
        value = jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"the environment parameter {name!r} is {value!r}, no array of numbers: {error}") from error
    if jnp.issubdtype(value.dtype, jnp.floating) and not jnp.issubdtype(dtype, jnp.floating):
        raise ConfigError(f"the environment parameter {name!r} is {dtype}, but was given {value.dtype}; convert it")
    return jnp.array(value, dtype)


def _arrays(environment: Environment, env_params: EnvParams) -> dict[str, jax.Array]:
    """The given values of traced parameters, with the parameters' dtypes."""
    for name in env_params or {}:
        if name not in environment.params:
            raise ConfigError(
                f"{environment.name!r} has no traced parameter {name!r}: {nearest(name, environment.params)}; the time "
                "limit, and parameters that decide shapes or branches, are static: Config(env_params=...)"
            )
    return {name: as_dtype(name, value, environment.params[name].dtype) for name, value in (env_params or {}).items()}

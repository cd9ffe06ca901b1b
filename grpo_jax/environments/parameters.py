"""The traced parameters of many environments: physics, sizes of rewards, chances."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.environments.environment import Environment
from grpo_jax.errors import ConfigError, nearest

EnvParams = Mapping[str, Any] | None
"""Values of an environment's traced parameters, by name, in place of the defaults."""


def parameters_of_groups(
    environment: Environment, env_params: EnvParams, num_groups: int, group_size: int
) -> dict[str, jax.Array]:
    """Every parameter, `[num_groups * group_size, ...]`: members of a group share their world.

    Args:
      environment: whose defaults hold where nothing else is said.
      env_params: a value for all groups, or an array `[num_groups, ...]` with one for each.
      num_groups, group_size: how many.

    Raises:
      ConfigError: for a name that is no traced parameter, or a value of another shape.
    """
    env_params = env_params or {}
    for name in env_params:
        if name not in environment.params:
            raise ConfigError(
                f"{environment.name!r} has no traced parameter {name!r}: {nearest(name, environment.params)}; the time "
                "limit, and what decides shapes or branches, is static: Config(env_params=...)"
            )

    def of_all(name, default):
        value = as_dtype(name, env_params.get(name, default), default.dtype)
        if value.shape not in (default.shape, (num_groups, *default.shape)):
            raise ConfigError(
                f"the environment parameter {name!r} has shape {value.shape}; give {default.shape} for all groups, or "
                f"{(num_groups, *default.shape)}, one for each"
            )
        return jnp.repeat(jnp.broadcast_to(value, (num_groups, *default.shape)), group_size, axis=0)

    return {name: of_all(name, default) for name, default in environment.params.items()}


def as_dtype(name: str, value: Any, dtype: Any) -> jax.Array:
    """A copy of a parameter's value, as a train state is to be donated.

    Raises:
      ConfigError: for a value of another kind, such as reals where integers are wanted, which would be truncated.
    """
    value = jnp.asarray(value)
    if jnp.issubdtype(value.dtype, jnp.floating) and not jnp.issubdtype(dtype, jnp.floating):
        raise ConfigError(f"the environment parameter {name!r} is of {dtype}, and was given {value.dtype}; convert it")
    return jnp.array(value, dtype)


def parameters_of_rows(environment: Environment, env_params: EnvParams, num_rows: int) -> dict[str, jax.Array]:
    """The given parameters with an axis of rows in front, each row's value as `parameters_of_groups` takes it.

    Args:
      environment: whose parameters.
      env_params: a value for all rows, or an array `[num_rows]` or `[num_rows, num_groups]`.
      num_rows: how many.

    Raises:
      ConfigError: for another number of rows.
    """
    rows = {name: jnp.asarray(value) for name, value in (env_params or {}).items()}
    for name, value in rows.items():
        if value.ndim == np.ndim(environment.params.get(name)):
            rows[name] = jnp.broadcast_to(value, (num_rows, *value.shape))
        elif value.shape[0] != num_rows:
            raise ConfigError(f"the environment parameter {name!r} has {value.shape[0]} rows in place of {num_rows}")
    return rows

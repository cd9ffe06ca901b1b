"""Checks before anything is compiled: the budget of a run, and one iteration on shapes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from grpo_jax.config import Config, kept_with
from grpo_jax.devices.mesh import ENVS, ROWS
from grpo_jax.environments.spaces import Discrete
from grpo_jax.errors import ConfigError, are_alike, describe_arrays, describe_function
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.training.budget import check_budget
from grpo_jax.training.train_step import initial_state, make_train_step
from grpo_jax.types import Metrics, first_difference
from grpo_jax.updates.schedules import check_schedule

_NUM_ENVS = 3


def check_run(config: Config, hyperparams: Hyperparams) -> None:
    """Raises ConfigError for hyperparameters or a budget that are invalid, and for a config whose parts do not fit."""
    check_budget(config, hyperparams)
    try_on_shapes(config, hyperparams)


def check_keys(keys: jax.Array) -> None:
    """Raises ConfigError unless `keys` are `[R]` keys of one row or more."""
    if not isinstance(keys, jax.Array | np.ndarray) or keys.ndim != (
        1 if jax.dtypes.issubdtype(keys.dtype, jax.dtypes.prng_key) else 2
    ):
        raise ConfigError(
            "keys must be an array of keys, one for each row, as from jax.random.split(jax.random.key(0), num_rows)"
        )
    if keys.shape[0] == 0:
        raise ConfigError("keys is empty, and one row is trained for each key; use jax.random.split(key, 1) or more")


def check_mesh(config: Config, mesh: Mesh) -> None:
    """Raises ConfigError if the mesh does not divide `num_envs`, or splits rows and environments that call the host."""
    num_devices = mesh.shape.get(ENVS, 1)
    if config.env.on_host and mesh.size > mesh.shape[ROWS] > 1:
        raise ConfigError(
            f"{config.env.name!r} calls the host, but JAX has no such calls where a mesh splits rows and also their "
            f"environments or policy, as {dict(mesh.shape)} does; use make_mesh(seeds={mesh.size}), or seeds=1"
        )
    if config.num_envs % num_devices:
        above = -(-config.num_envs // num_devices) * num_devices
        raise ConfigError(
            f"num_envs={config.num_envs} environments cannot be split evenly over {ENVS}={num_devices} devices; use "
            f"num_envs={above} (best a multiple of group_size on each device)"
        )


def try_on_shapes(config: Config, hyperparams: Hyperparams) -> Metrics:
    """Runs `init` and a train step on shapes, once for each config and structure of hyperparameters.

    Args:
      config: what to run.
      hyperparams: only their class matters, and which of them are None.

    Returns:
      The shapes of the metrics.

    Raises:
      ConfigError: an algorithm, a network, a distribution, an optimiser or a schedule that does not fit, with what to
        write instead.
    """
    structure = jax.tree.structure(hyperparams)
    return kept_with(
        config, ("shapes", structure, jax.config.jax_enable_x64), lambda: _try_on_shapes(config, structure)
    )


def _try_on_shapes(config: Config, structure: Any) -> Metrics:
    check_schedule(config.schedule)
    if config.has_custom_distribution or config.has_custom_network:
        _check_distribution(config)
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    hyperparams = structure.unflatten([scalar] * structure.num_leaves)
    try:
        with jax.disable_jit(False):  # which would trace every step of a loop
            key = jax.eval_shape(jax.random.key, 0)
            state = jax.eval_shape(functools.partial(initial_state, config), key, hyperparams)
            after, metrics = jax.eval_shape(make_train_step(config), state)
    except ConfigError:
        raise
    except Exception as error:  # of a custom slot, or other code of the user
        raise ConfigError(f"the algorithm and this configuration do not fit: {error}") from error
    if difference := first_difference(state, after):
        path, before, changed = difference
        raise ConfigError(
            f"the state's {path} is {before} before an iteration, but {changed} after it; both must have the same "
            "structure, shapes and dtypes"
        )
    return metrics


def _check_distribution(config: Config) -> None:
    """Tries every function of a custom distribution on shapes."""
    distribution, space = config.policy.distribution, config.env.action_space
    name = describe_function("action_distribution", config.action_distribution)
    batch = (_NUM_ENVS,)
    parameters = jax.ShapeDtypeStruct((*batch, distribution.num_parameters), jnp.float32)

    def shapes(part, *arguments):
        try:
            return jax.eval_shape(getattr(distribution, part), *arguments)
        except Exception as error:  # of the user's code
            raise ConfigError(f"{name}: {part} fails with {type(error).__name__}: {error}") from error

    action, mode = shapes("sample", parameters, jax.random.key(0)), shapes("mode", parameters)
    if not are_alike(action, mode):
        raise ConfigError(
            f"{name}: samples are {describe_arrays(action)}, but modes {describe_arrays(mode)}; make them alike"
        )
    for part, arguments in (("log_prob", (action,)), ("entropy", ()), ("kl", (parameters,))):
        result = shapes(part, parameters, *arguments)
        if not are_alike(result, jax.ShapeDtypeStruct(batch, jnp.float32)):
            raise ConfigError(
                f"{name}: {part} gives {describe_arrays(result)} instead of float32{list(batch)}; it must be [N], one "
                "number for each action"
            )
    size = () if isinstance(space, Discrete) else (len(space[0]),)
    taken = shapes("to_environment", action)
    if getattr(taken, "shape", None) != (*batch, *size):
        raise ConfigError(
            f"{name}: to_environment gives {describe_arrays(taken)} for {_NUM_ENVS} actions in {space}; make it "
            f"{list((*batch, *size))}"
        )

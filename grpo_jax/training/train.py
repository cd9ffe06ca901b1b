"""What starts a run, and trains it in one program: `init`, of one row or of all, and `train`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from grpo_jax.config import Config
from grpo_jax.devices.mesh import over_rows, pad_rows
from grpo_jax.environments import EnvParams, row_parameters
from grpo_jax.errors import ConfigError, as_count, describe_arrays
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.policies.normalization import Normalizer
from grpo_jax.training.checks import try_on_shapes
from grpo_jax.training.train_step import initial_state, make_train_step
from grpo_jax.types import Metrics, PyTree, TrainState


def make_init(config: Config) -> Callable[..., TrainState]:
    """`init(key, hyperparams, env_params=None, params=None) -> TrainState`, pure: `vmap` it over all four.

    `env_params` are parameters of the environment by name, instead of the config's: one value for all groups, or an
    array `[num_groups]`, one for each. Rollouts keep them, and `evaluate` plays under them. `params` are the policy's,
    and the reference policy's, instead of random ones.

    The first call or trace runs an iteration on shapes, and raises ConfigError if the parts of the config do not fit.
    """

    def init(
        key: jax.Array, hyperparams: Hyperparams, env_params: EnvParams = None, params: PyTree = None
    ) -> TrainState:
        hyperparams.check()
        if any(jnp.ndim(leaf) for leaf in jax.tree.leaves(hyperparams)):
            raise ConfigError("init makes one state, of scalar hyperparameters; for arrays of them use jax.vmap(init)")
        try_on_shapes(config, hyperparams)
        return initial_state(config, key, hyperparams, env_params, params)

    return init


def make_train(config: Config, num_iterations: int) -> Callable[..., tuple[TrainState, Metrics]]:
    """`train(key, hyperparams, env_params=None, params=None) -> (state, metrics)`, pure: `jit` it, and `vmap` it.

        states, metrics = jax.jit(jax.vmap(make_train(config, 10)))(keys, hyperparams.broadcast(len(keys)))

    Args:
      config: what to run.
      num_iterations: train steps after `init`, which takes the same arguments. The metrics are `[num_iterations]`.
    """
    init, train_step, length = make_init(config), make_train_step(config), as_count("num_iterations", num_iterations)

    def train(
        key: jax.Array, hyperparams: Hyperparams, env_params: EnvParams = None, params: PyTree = None
    ) -> tuple[TrainState, Metrics]:
        state = init(key, hyperparams, env_params, params)
        return jax.lax.scan(lambda state, _: train_step(state), state, length=length)

    return train


def initial_states(
    config: Config,
    hyperparams: Hyperparams,
    keys: jax.Array,
    env_params: EnvParams = None,
    params: PyTree = None,
    normalizer: Normalizer | None = None,
    *,
    mesh: Mesh | None = None,
) -> TrainState:
    """The states that `run` starts from, `[R, ...]`: one row for each key, padded to what the mesh divides. Pure."""
    num_rows, init = keys.shape[0], make_init(config)

    def begin(row):
        *arguments, given = row
        state = init(*arguments)
        if given is None:
            return state
        known, shapes = (describe_arrays(each.observation) for each in (state.normalizer, given))
        if known != shapes:
            raise ConfigError(f"normalizer has statistics of observations {shapes}, but they are {known} in this run")
        return state.replace(normalizer=state.normalizer._replace(observation=given.observation))

    rows = keys, hyperparams.broadcast(num_rows), row_parameters(config.env, env_params, num_rows), params, normalizer
    if mesh is None:
        return jax.vmap(begin)(rows)
    return over_rows(begin, mesh)(pad_rows(rows, mesh))

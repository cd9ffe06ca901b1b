"""Every algorithm as users run it: real initial weights, an optimised program, default hyperparameters."""

import jax
import numpy as np
import pytest
from probes import difference

from grpo_jax import Config, Hyperparams, make_train
from grpo_jax.algorithms import ALGORITHMS
from grpo_jax.policies import MLP, Transformer

FAMILIES = "grpo", "ppo"
AS_USERS_COMPILE = {"xla_backend_optimization_level": 3, "xla_cpu_parallel_codegen_split_count": 32}
SIZES = {"num_envs": 16, "group_size": 4, "num_minibatches": 2, "num_epochs": 2}
CARTPOLE = {"environment": "CartPole-v1", "env_params": {"max_steps_in_episode": 24}, "network": MLP((8,))}
WORDS = {"environment": "tokens:sort-3", "network": Transformer(num_layers=1, width=8, num_heads=2)}


@pytest.mark.parametrize(
    "name", [name if name in FAMILIES else pytest.param(name, marks=pytest.mark.slow) for name in ALGORITHMS]
)
@pytest.mark.usefixtures("initial_weights_of_users")
def test_an_algorithm_trains(name):
    fields = WORDS if name == "gdpo" else CARTPOLE  # which compares the parts of a reward
    config = Config(algorithm=name, **SIZES | fields)
    train = jax.jit(make_train(config, 3), compiler_options=AS_USERS_COMPILE)
    start, _ = train(jax.random.key(0), Hyperparams(learning_rate=0.0))
    state, metrics = train(jax.random.key(0), Hyperparams())
    assert difference(start.params, state.params) and not metrics["optim/skipped_updates"].any()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.params, state.opt_state, metrics)))

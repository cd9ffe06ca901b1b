"""Every algorithm as users run it: real initial weights, an optimised program, default hyperparameters."""

import jax
import numpy as np
import pytest
from probes import bits, difference

from grpo_jax import Config, make_train
from grpo_jax.algorithms import ALGORITHMS
from grpo_jax.policies import MLP, Transformer
from grpo_jax.training.checks import unread_fields

AS_USERS_COMPILE = {"xla_backend_optimization_level": 3, "xla_cpu_parallel_codegen_split_count": 32}
SIZES = {"num_envs": 16, "group_size": 4, "num_minibatches": 2, "num_epochs": 2}
CARTPOLE = {"environment": "CartPole-v1", "env_params": {"max_steps_in_episode": 24}, "network": MLP((8,))}
WORDS = {"environment": "tokens:sort-3", "network": Transformer(num_layers=1, width=8, num_heads=2)}


@pytest.mark.parametrize("name", [x if x == "grpo" else pytest.param(x, marks=pytest.mark.slow) for x in ALGORITHMS])
@pytest.mark.usefixtures("initial_weights_of_users")
def test_an_algorithm_trains_and_nothing_unread_changes_it(name):
    fields, numbers = CARTPOLE, {}
    if name == "gdpo":  # compares the parts of a reward, of which random tokens get none
        fields, numbers = WORDS, {"entropy_coef": 0.01}
    config, key = Config(algorithm=name, **SIZES | fields), jax.random.key(0)
    train = jax.jit(make_train(config, 3), compiler_options=AS_USERS_COMPILE)
    hyperparams = config.algorithm.hyperparams(**numbers)
    start, _ = train(key, hyperparams.replace(learning_rate=0.0))
    state, metrics = train(key, hyperparams)
    assert difference(start.params, state.params) and not metrics["optim/skipped_updates"].any()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.params, state.opt_state, metrics)))

    numbers = {name: value for name, value in vars(hyperparams).items() if value is not None}
    unread = unread_fields(config, hyperparams, numbers)
    assert unread and "learning_rate" not in unread
    other, same = train(key, hyperparams.replace(**{name: 0.9 * numbers[name] + 0.01 for name in unread}))
    assert bits((other.params, other.opt_state, same)) == bits((state.params, state.opt_state, metrics))

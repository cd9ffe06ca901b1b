"""Train steps under JAX's strict settings: `jax_debug_nans`, and promotions of ranks and dtypes that raise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import Probe, copy_task

from grpo_jax import GRPO, Config, Hyperparams, evaluate, make_init, make_train_step, with_reference
from grpo_jax.config import kept_with
from grpo_jax.policies import MLP, Transformer

SIZES = {"num_envs": 4, "num_minibatches": 1, "num_epochs": 1, "network": MLP((4,))}
ONE = {"environment": Probe(), "num_steps": 2, **SIZES}  # less than an episode, so none ends
GROUPS = {"environment": Probe(), "group_size": 2, **SIZES}
TRANSFORMER = Transformer(num_layers=1, width=8, num_heads=2, qk_norm=True, lora_rank=2)
TOKENS = GROUPS | {"environment": copy_task(), "network": TRANSFORMER}
CASES = {
    "ppo": ONE | {"algorithm": "ppo", "normalize_observations": True, "normalize_rewards": True},
    "recurrent": ONE | {"algorithm": "ppo", "network": MLP((4,), recurrent="gru", layer_norm=True)},
    "real actions": ONE | {"algorithm": "ppo", "environment": "Pendulum-v1"},
    "accelerator": ONE | {"algorithm": "ppo", "execution_plan": "gpu"},
    "kernel": ONE | {"algorithm": "kernel_gae", "group_size": 2},
    "no live group": GROUPS | {"algorithm": "dapo"},  # no group's returns differ, so no sample is valid
    "no valid episode": GROUPS | {"algorithm": GRPO._replace(filter_overlong=True), "num_kept_groups": 1},
    "chunked tokens": TOKENS | {"algorithm": with_reference(GRPO), "logits_chunk": 8},
    "truncated tokens": TOKENS | {"algorithm": "grpo", "truncate_sampling": True},
}


def step_and_evaluate(config):
    """The state and metrics after a train step, and the returns of an evaluation."""

    def play(key):
        state, metrics = make_train_step(config)(make_init(config)(key, Hyperparams(kl_coef=0.1)))
        return state, metrics, evaluate(config, state, key, num_episodes=4).returns

    return play


def cases(*light):
    """All of them; those that are not light are slow."""
    return [name if name in light else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize("name", cases("ppo", "kernel", "no live group"))
def test_no_array_is_promoted_to_another_rank_or_dtype(name):
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(step_and_evaluate(Config(**CASES[name])), jax.random.key(0))


@pytest.mark.parametrize("name", cases("no live group"))
def test_metrics_that_do_not_exist_are_no_nan_to_debug(name):
    with jax.debug_nans(True):
        _, metrics, returns = jax.jit(step_and_evaluate(Config(**CASES[name])))(jax.random.key(0))
    assert np.isfinite(returns).all() and float(metrics["optim/skipped_updates"]) == 0
    if CASES[name].get("num_steps"):
        assert metrics["episode/return_mean"] == -np.inf, "no episode has ended"


def test_programs_kept_for_equal_configs_are_of_the_same_settings_of_jax():
    first, again = (Config(**ONE | {"algorithm": "ppo", "environment": "CartPole-v1"}) for _ in range(2))
    kept = kept_with(first, ("state",), lambda: jnp.zeros(1))
    assert kept_with(again, ("state",), lambda: jnp.zeros(1)) is kept
    with jax.enable_x64(True):
        assert kept_with(again, ("state",), lambda: jnp.zeros(1)).dtype == jnp.float64


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ppo", "kernel_gae"])
def test_no_operation_of_a_sound_step_makes_a_nan(algorithm):
    """Or `jax.debug_nans` would name it instead of the one at fault."""
    config = Config(**ONE | {"environment": "CartPole-v1", "algorithm": algorithm})
    state = jax.jit(make_init(config))(jax.random.key(0), Hyperparams())
    with jax.disable_jit(), jax.debug_nans(True):
        make_train_step(config)(state)

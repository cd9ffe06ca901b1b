import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilation import compile_for_h100

from grpo_jax import Config, Hyperparams, make_init, make_train_step, with_reference
from grpo_jax.algorithms import CISPO, GRPO, PPO, SAPO
from grpo_jax.devices.execution_plan import CPU
from grpo_jax.errors import ConfigError
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.updates.batch import make_batch
from grpo_jax.updates.gradient_kernel import BLOCK, make_kernel_gradient
from grpo_jax.updates.minibatches import make_gradient, make_minibatch

PLAN = dataclasses.replace(CPU, gradient_kernel=True)


def make_samples(environment, algorithm, num_envs=8, num_steps=16, **fields):
    """A config, its state, parameters beside those that acted, and the batch of one rollout."""
    fields = {"hidden_sizes": (16,), "cut_episodes": True, "num_minibatches": 1} | fields
    config = Config(environment, algorithm, num_envs=num_envs, num_steps=num_steps, **fields)

    @jax.jit
    def make(key):
        state = make_init(config)(key, Hyperparams(entropy_coef=0.01))
        simulator = Simulator(config.env, config.policy, state.params)
        begun = config.algorithm.start.begin(simulator, state.rollout, key, config.group_size)
        auto_reset = config.algorithm.start.auto_reset
        _, trajectory = simulator.unroll(begun, key, num_steps=num_steps, auto_reset=auto_reset)
        reference = state.reference_params
        batch = make_batch(
            *(config.algorithm, config.policy, state.params, trajectory, reference, state.hyperparams),
            config.group_size,
        )[0]
        params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), state.params)
        return state, params, batch

    return config, *make(jax.random.key(0))


@pytest.mark.parametrize(
    "environment, algorithm, fields",
    [
        ("CartPole-v1", PPO, {}),
        pytest.param(
            *("CartPole-v1", with_reference(GRPO), {"activation": "relu", "hidden_sizes": (32, 16)}),
            marks=pytest.mark.slow,
        ),
        pytest.param("CartPole-v1", CISPO, {}, marks=pytest.mark.slow),
        pytest.param("MountainCar-v0", SAPO, {}, marks=pytest.mark.slow),
        pytest.param("Pendulum-v1", PPO, {"shared_critic": True}, marks=pytest.mark.slow),
    ],
    ids=["ppo", "grpo_with_reference", "cispo", "three_actions", "gaussian_with_shared_critic"],
)
def test_kernel_has_the_loss_metrics_and_gradient_of_the_loss(environment, algorithm, fields):
    config, state, params, batch = make_samples(environment, algorithm, **fields)
    indices = jax.random.permutation(jax.random.key(1), batch.mask.shape[1])[: 3 * BLOCK - 5]

    @jax.jit
    def both(params, hyperparams):
        minibatch = make_minibatch(config.algorithm, batch, indices)
        arguments = config.algorithm, config.policy, batch, hyperparams
        return make_gradient(*arguments, 1)(params, minibatch), make_kernel_gradient(*arguments)(params, minibatch)

    expected, (total, metrics, gradient) = both(params, state.hyperparams)
    np.testing.assert_allclose(total, expected[0], rtol=1e-5, atol=1e-6)
    assert metrics.keys() == expected[1].keys()
    for name, value in metrics.items():
        np.testing.assert_allclose(value, expected[1][name], rtol=1e-5, atol=1e-6, err_msg=name)
    scale = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(expected[2]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a / scale, b / scale, atol=1e-5), gradient, expected[2])


def take_train_step(config):
    """States and metrics of two rows after a train step, from equal keys for every config: kernels under vmap."""
    states = jax.vmap(functools.partial(make_init(config), hyperparams=Hyperparams()))(
        jax.random.split(jax.random.key(0), 2)
    )
    return jax.jit(jax.vmap(make_train_step(config)))(states)


@pytest.mark.slow
def test_train_step_with_the_kernel_is_the_same_up_to_rounding():
    fields = {"algorithm": "ppo", "num_envs": 4, "num_steps": 16, "num_minibatches": 2, "num_epochs": 1}
    configs = [Config(hidden_sizes=(16,), normalize_observations=True, execution_plan=p, **fields) for p in (CPU, PLAN)]
    results = [take_train_step(config) for config in configs]
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), *(state.params for state, _ in results))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"algorithm": "gspo"}, "compares or carries over several"),
        ({"algorithm": "clip_cov"}, "compares or carries over several"),
        ({"algorithm": "ppo", "recurrent": "gru"}, "compares or carries over several"),
        ({"algorithm": "ppo", "hidden_sizes": (256, 256)}, "65536 weights"),
        ({"algorithm": "ppo", "num_microbatches": 2}, "num_microbatches=2"),
        (
            {"algorithm": "ppo", "environment": "Breakout-MinAtar"},
            "gradient_kernel=True cannot serve 'Breakout-MinAtar'",
        ),
    ],
)
def test_errors_say_what_the_kernel_cannot_serve(fields, message):
    with pytest.raises(ConfigError, match=message):
        Config(num_envs=32, execution_plan=PLAN, **fields)


def test_kernel_compiles_for_a_gpu():
    config, state, params, batch = make_samples("CartPole-v1", PPO, hidden_sizes=(64, 64))

    def gradient(params, batch, hyperparams):
        indices = jnp.arange(batch.mask.shape[1])
        minibatch = make_minibatch(config.algorithm, batch, indices)
        return make_kernel_gradient(config.algorithm, config.policy, batch, hyperparams)(params, minibatch)

    assert "gradient_kernel" in compile_for_h100(gradient, params, batch, state.hyperparams).as_text()

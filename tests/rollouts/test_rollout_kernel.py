import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilation import compile_for_h100

from grpo_jax import Config, Hyperparams, make_init, make_train_step
from grpo_jax.devices.execution_plan import CPU
from grpo_jax.errors import ConfigError
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.rollouts.rollout_kernel import kernel_unroll

PLAN = dataclasses.replace(CPU, rollout_kernel=True)
SHORT = {"max_steps_in_episode": 12}
ENVIRONMENTS = ("CartPole-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0")


def make_rollout(environment, algorithm="ppo", num_envs=40, num_steps=24, num_sharing=1, keep_final=False, **fields):
    """The state that a rollout begins from, and `unroll(kernel_or_scan)(state, params, key)`."""
    config = Config(
        *(environment, algorithm),
        num_envs=num_envs,
        num_steps=num_steps,
        cut_episodes=True,
        hidden_sizes=(16,),
        num_minibatches=1,
        **fields,
    )
    state = jax.jit(make_init(config))(jax.random.key(0), Hyperparams())
    simulator = Simulator(config.env, config.policy, state.params, 0.99, "auto", config.starts_per_rollout)
    begun = config.algorithm.start.begin(simulator, state.rollout, jax.random.key(1), config.group_size)
    options = {"num_steps": num_steps, "auto_reset": config.algorithm.start.auto_reset, "num_sharing": num_sharing}

    def unroll(function):
        return lambda state, params, key: function(
            simulator._replace(params=params), state, key, keep_final=keep_final, **options
        )

    return begun, state.params, unroll


@pytest.mark.parametrize(
    "environment, options",
    [
        ("CartPole-v1", {"env_params": SHORT}),
        pytest.param("CartPole-v1", {"algorithm": "grpo"}, marks=pytest.mark.slow),
        pytest.param(
            *("Pendulum-v1", {"env_params": SHORT, "keep_final": True, "num_sharing": 4, "starts_per_rollout": 1}),
            marks=pytest.mark.slow,
        ),
        pytest.param("MountainCar-v0", {"env_params": SHORT}, marks=pytest.mark.slow),
        pytest.param("MountainCarContinuous-v0", {}, marks=pytest.mark.slow),
    ],
    ids=[
        "cartpole",
        "one_episode_groups",
        "pendulum_finals_one_start",
        "mountain_car",
        "mountain_car_continuous",
    ],
)
def test_kernel_plays_the_same_rollout(environment, options):
    start, params, unroll = make_rollout(environment, **options)
    key = jax.random.key(2)
    end, trajectory = jax.jit(unroll(kernel_unroll))(start, params, key)
    expected_end, expected = jax.jit(unroll(Simulator.unroll))(start, params, key)
    assert jnp.sum(expected.ended) > 0 or environment == "MountainCarContinuous-v0"
    for name in ("terminated", "truncated", "valid", "episode_length"):
        np.testing.assert_array_equal(getattr(trajectory, name), getattr(expected, name), err_msg=name)
    if jnp.issubdtype(expected.action.dtype, jnp.integer):
        np.testing.assert_array_equal(trajectory.action, expected.action)
    assert jax.tree.structure((end, trajectory)) == jax.tree.structure((expected_end, expected))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), (end, trajectory), (expected_end, expected)
    )


def take_train_step(config):
    """States and metrics of two rows after a train step, from equal keys for every config: kernels under vmap."""
    states = jax.vmap(functools.partial(make_init(config), hyperparams=Hyperparams()))(
        jax.random.split(jax.random.key(0), 2)
    )
    return jax.jit(jax.vmap(make_train_step(config)))(states)


@pytest.mark.slow
def test_train_step_with_the_kernel_is_the_same_up_to_rounding():
    fields = {"algorithm": "grpo", "num_envs": 8, "num_steps": 16, "num_minibatches": 1, "cut_episodes": True}
    configs = [Config(hidden_sizes=(16,), num_epochs=1, execution_plan=plan, **fields) for plan in (CPU, PLAN)]
    results = [take_train_step(config) for config in configs]
    (_, expected), (_, metrics) = results
    for name in metrics:
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"environment": "Acrobot-v1"}, "'Acrobot-v1'.* draw no random numbers"),
        ({"environment": "SpaceInvaders-MinAtar", "hidden_sizes": (8,)}, "'SpaceInvaders-MinAtar'.* kernels lack "),
        ({"recurrent": "gru"}, "recurrent layer"),
        ({"hidden_sizes": (256, 128)}, "32768 weights is more than fits into shared memory, 16384"),
        ({"algorithm": "remax"}, "greedy_member"),
    ],
)
def test_errors_say_what_the_kernel_cannot_serve(fields, message):
    with pytest.raises(ConfigError, match=message):
        Config(**({"algorithm": "ppo", "num_envs": 32, "execution_plan": PLAN} | fields))


@pytest.mark.parametrize("kernel", ["rollout_kernel", "gradient_kernel"])
@pytest.mark.parametrize("axis", ["envs", "model"])
def test_kernels_are_for_one_device(kernel, axis):
    config = Config(num_envs=4, hidden_sizes=(8,), execution_plan=dataclasses.replace(CPU, **{kernel: True}))
    state = jax.eval_shape(lambda: make_init(config)(jax.random.key(0), Hyperparams()))
    mesh = jax.sharding.AbstractMesh((1, 2), ("seeds", axis), (jax.sharding.AxisType.Auto,) * 2)
    with (
        jax.sharding.use_abstract_mesh(mesh),
        pytest.raises(ConfigError, match=f"{kernel}=True .* the mesh splits environments or policies over several"),
    ):
        jax.eval_shape(make_train_step(config), state)


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_kernel_compiles_for_a_gpu(environment):
    start, params, unroll = make_rollout(environment)
    compiled = compile_for_h100(unroll(kernel_unroll), start, params, jax.random.key(0))
    assert "rollout_kernel" in compiled.as_text()

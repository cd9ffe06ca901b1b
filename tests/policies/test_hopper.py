"""Which networks the Hopper kernel computes, what it gets, and that whole train steps are those of XLA."""

import contextlib
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import Parts

from grpo_jax import Config, Hyperparams, make_init, make_train_step
from grpo_jax.devices.execution_plan import GPU, HOPPER
from grpo_jax.devices.mesh import make_mesh, over_rows, state_shardings
from grpo_jax.policies import CNN, MLP, hopper

SIZES = {"num_envs": 8, "num_epochs": 1, "num_minibatches": 2, "num_steps": 4, "network": MLP((16, 16))}
PPO = SIZES | {"algorithm": "ppo", "shuffle_blocks": 2}
GRPO = SIZES | {"env_params": {"max_steps_in_episode": 4}, "group_size": 4}


@pytest.fixture
def calls(monkeypatch):
    """The networks and rows of every call of the kernel, in whose place XLA computes on a CPU, also of jax 0.10."""
    seen = []

    def dense_networks(params, x, activation):
        seen.append((len(params), len(x)))
        outputs = []
        for *hidden, (kernel, bias) in params:
            h = x
            for hidden_kernel, hidden_bias in hidden:
                h = getattr(jax.nn, activation)(h @ hidden_kernel + hidden_bias)
            outputs.append(h @ kernel + bias)
        return tuple(outputs)

    monkeypatch.setattr(hopper, "dense_networks", dense_networks)
    monkeypatch.setattr(hopper, "PLATFORMS", ("cpu",))
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    return seen


class Own(MLP):
    """A network by value that takes the options of today alone."""

    def __call__(self, observation, distribution, critic, *, steps_per_loop=1):
        return super().__call__(observation, distribution, critic, steps_per_loop=steps_per_loop)


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({}, "Hopper kernel; without a GPU, XLA"),
        ({"network": MLP((32,), "relu", shared_critic=True), "environment": "Pendulum-v1"}, "Hopper kernel.*"),
        ({"environment": Parts(), "algorithm": "grpo"}, "Hopper kernel.*"),  # a dict of observations
        ({"network": MLP((48, 32))}, "XLA (.*48, 32.*"),
        ({"network": MLP(activation="elu")}, "XLA (.*elu.*"),
        ({"network": MLP(recurrent="gru")}, "XLA (recurrent='gru')"),
        ({"network": MLP(layer_norm=True)}, "XLA (layer_norm=True)"),
        ({"environment": "Breakout-MinAtar", "network": CNN()}, "XLA (the network is no MLP)"),
        ({"network": Own()}, "XLA (the network is no MLP)"),
        ({"environment": "tokens:sort-3", "algorithm": "grpo"}, "XLA (the network is no MLP)"),
    ],
)
def test_a_config_says_what_computes_its_networks(calls, fields, answer):
    config = Config(**{"algorithm": "ppo", "execution_plan": "hopper"} | fields)
    assert re.fullmatch(answer.replace("(", r"\(").replace(")", r"\)"), config.networks_by), config.networks_by
    assert dataclasses.replace(config, execution_plan="gpu").networks_by is None


def make_training(fields, plan, mesh):
    """What makes the states of two rows, and their train step."""
    config = Config(**fields, execution_plan=dataclasses.replace(plan, steps_per_loop=1))
    hyperparams = jax.tree.map(lambda leaf: jnp.full(2, leaf, jnp.float32), Hyperparams(total_steps=1e6))
    init = jax.jit(jax.vmap(make_init(config)))
    step = jax.jit(over_rows(make_train_step(config), mesh))
    return functools.partial(init, jax.random.split(jax.random.key(0), 2), hyperparams), step


def trained(fields, plan, mesh):
    """A train step of two rows."""
    init, step = make_training(fields, plan, mesh)
    states = init()
    end, metrics = step(jax.device_put(states, state_shardings(mesh, states)))
    return jax.tree.map(np.asarray, (end.params, metrics))


@pytest.mark.parametrize("setting", [None, "precision", "x64"])
def test_a_step_has_a_kernel_for_each_network_and_a_sequence_one_for_both(calls, setting):
    """A step whose values nothing reads does not compute the critic. Where products are exact, all is XLA's."""
    policy = Config(**PPO, execution_plan="hopper").policy
    precise, double = jax.default_matmul_precision("highest"), jax.enable_x64(True)
    with {None: contextlib.nullcontext(), "precision": precise, "x64": double}[setting]:
        params, carry = jax.eval_shape(policy.init, jax.random.key(0)), policy.initial_carry(None, 8)
        jax.eval_shape(policy.step, params, jnp.zeros((8, 4)), carry)
        jax.eval_shape(policy.sequence, params, jnp.zeros((3, 8, 4)), carry, jnp.zeros((3, 8), bool))
    assert calls == ([(1, 8), (1, 8), (2, 24)] if setting is None else [])


def test_values_and_gradients_with_the_kernel_are_those_of_xla(calls):
    x, found = jax.random.normal(jax.random.key(1), (3, 8, 4)), []
    params = jax.jit(Config(**PPO).policy.init)(jax.random.key(0))
    for plan in (GPU, HOPPER):
        policy = Config(**PPO, execution_plan=plan).policy

        def total(params, policy=policy):
            logits, values = policy.sequence(params, x, policy.initial_carry(None, 8), jnp.zeros((3, 8), bool))
            return jnp.sum(jnp.sin(logits)) + jnp.sum(jnp.sin(values)), (logits, values)

        found.append(jax.jit(jax.value_and_grad(total, has_aux=True))(params))
        assert bool(calls) == (plan is HOPPER)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(other, one, rtol=2e-4, atol=2e-5), *found)


def test_each_device_gives_the_kernel_its_own_samples(calls):
    init, step = make_training(PPO, HOPPER, make_mesh(seeds=1, envs=2))
    jax.eval_shape(step, jax.eval_shape(init))
    assert calls[-1] == (2, 8), calls  # half of a minibatch


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "num_devices", "last"), [(PPO, 2, (2, 8)), (GRPO, 1, (1, 16))])
def test_a_train_step_with_the_kernel_is_that_of_xla(calls, fields, num_devices, last):
    """Where environments are on two devices, each gives the kernel its own samples."""
    by_xla = trained(fields, GPU, make_mesh(seeds=1))
    assert not calls
    by_kernel = trained(fields, HOPPER, make_mesh(seeds=1, envs=num_devices))
    assert calls[-1] == last, calls  # of a minibatch
    for one, other in zip(*map(jax.tree.leaves, (by_xla, by_kernel)), strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-4, atol=2e-5)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernel needs jax 0.11")
def test_the_plan_is_lowered_for_a_gpu_that_is_not_there_and_for_a_cpu():
    policy = Config(**PPO, environment="Pendulum-v1", execution_plan="hopper").policy  # 3 inputs, 1 output each
    carry = policy.initial_carry(None, 8)
    params, x = jax.eval_shape(policy.init, jax.random.key(0)), jax.ShapeDtypeStruct((1, 8, 3), jnp.float32)

    def gradient(params, x):
        is_first = jnp.zeros((1, 8), bool)
        return jax.grad(lambda params: sum(map(jnp.sum, policy.sequence(params, x, carry, is_first))))(params)

    for platform in ("cuda", "cpu"):
        text = jax.jit(gradient).trace(params, x).lower(lowering_platforms=(platform,)).as_text()
        assert ("mosaic_gpu" in text) == (platform == "cuda")

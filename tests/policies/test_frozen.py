"""Policies of which a part stays frozen, held against policies whose frozen part is a constant of the program."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import Probe, bits

from grpo_jax import Config, Hyperparams, make_init, make_train_step, with_reference
from grpo_jax.algorithms import PPO
from grpo_jax.objectives import averaged_reference
from grpo_jax.policies import combine, make_pure_policy, partition

SMALL = {"num_envs": 8, "num_steps": 8, "num_minibatches": 2, "num_epochs": 1}
HEADS = ("network/actor", "network/critic")
AVERAGED = with_reference(PPO, functools.partial(averaged_reference, decay=0.5))


def init(key, observation):
    shapes = {"torso": (observation.shape[-1], 16), "actor": (16, 2), "critic": (16, 1)}
    return {name: 0.3 * jax.random.normal(key, shape) for name, shape in shapes.items()}


def apply(params, observation):
    features = jnp.tanh(observation @ params["torso"])
    return features @ params["actor"], (features @ params["critic"])[:, 0]


def network(*arguments):
    return make_pure_policy(init, apply, *arguments)._replace(trainable=HEADS.__contains__)


def without_torso(params):
    return {name: params[name] for name in ("actor", "critic")}


def constant_torso(*arguments, torso):
    return make_pure_policy(
        lambda key, observation: without_torso(init(key, observation)),
        lambda params, observation: apply(params | {"torso": torso}, observation),
        *arguments,
    )


def train(config, **fields):
    """The state before and after two train steps, and the metrics of the last."""
    start = state = jax.jit(make_init(config))(jax.random.key(0), Hyperparams(**fields))
    step = jax.jit(make_train_step(config))
    for _ in range(2):
        state, metrics = step(state)
    return start, state, metrics


MUON = pytest.param(PPO, {"optimizer": "muon"}, {}, marks=pytest.mark.slow)


@pytest.mark.parametrize("algorithm, fields, hyperparams", [(AVERAGED, {}, {"kl_coef": 0.1}), MUON])
def test_training_is_that_of_a_policy_with_the_frozen_part_as_a_constant(algorithm, fields, hyperparams):
    config = Config(Probe(), algorithm, network=network, env_params={"bonus": 1.0}, **SMALL | fields)
    start, state, metrics = train(config, **hyperparams)
    torso = np.asarray(start.params["network"]["torso"])
    constant = dataclasses.replace(config, network=functools.partial(constant_torso, torso=torso))
    expected_start, expected, expected_metrics = train(constant, **hyperparams)

    assert bits(without_torso(start.params["network"])) == bits(expected_start.params["network"])
    np.testing.assert_array_equal(state.params["network"]["torso"], torso)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, without_torso(state.params["network"]), expected.params["network"])
    parts = (state.opt_state, state.reference_params), (expected.opt_state, expected.reference_params)
    assert [x.shape for x in jax.tree.leaves(parts[0])] == [x.shape for x in jax.tree.leaves(parts[1])]
    jax.tree.map(close, *(jax.tree.leaves(part) for part in parts))
    jax.tree.map(close, metrics, expected_metrics)


def test_parts_of_a_partition_make_the_whole():
    policy = Config(network=network, algorithm="ppo").policy
    params = policy.init(jax.random.key(0))
    trained, frozen = partition(policy, params)
    assert trained["network"]["torso"] is None and frozen["network"]["actor"] is None
    assert bits(combine(trained, frozen)) == bits(params) == bits(combine(params, frozen))
    everything = policy._replace(trainable=None)
    assert partition(everything, params) == (params, None) and combine(params, None) is params

"""The examples: they compute what the library computes, and learn."""

import functools
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gymnax.environments.classic_control.cartpole import CartPole

from grpo_jax import GRPO, PPO, Config, Hyperparams, make_init, make_train_step, with_reference
from grpo_jax.objectives import grpo_loss, ppo_loss, whiten
from grpo_jax.policies import categorical
from grpo_jax.updates import epochs

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {"NUM_EPOCHS": 2, "NUM_MINIBATCHES": 2, "LEARNING_RATE": 0.01}


class SameStart(CartPole):
    """Every episode starts at one state: the library's start states have other keys than those of gymnax's `step`."""

    def reset_env(self, key, params):
        return super().reset_env(jax.random.key(0), params)


def load(name, **constants):
    """A copy of an example with other constants, and a fixed step size."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    spec.loader.exec_module(example := importlib.util.module_from_spec(spec))
    vars(example).update(constants)
    if "LEARNING_RATE" in constants:
        example.OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(example.LEARNING_RATE, eps=1e-5))
    return example


def from_gumbel(space):
    """Samples of the library from the noise of the examples."""
    return categorical(space.num_actions)._replace(
        noise=lambda key, shape: jax.random.gumbel(key, (*shape, space.num_actions)),
        from_noise=lambda logits, noise: jnp.argmax(logits + noise, axis=-1),
    )


def assert_equal_to_the_library(example, monkeypatch, hyperparams, **fields):
    """Two iterations of both, from the same parameters, with the same noise and the same minibatches."""
    gumbel = jax.random.gumbel
    monkeypatch.setattr(jax.random, "gumbel", lambda key, shape: gumbel(jax.random.key(1), shape))
    monkeypatch.setattr(epochs, "minibatch_order", lambda _, k, mask: example.minibatch_order(k, mask.size)[:, None])
    config = Config(num_epochs=2, num_minibatches=2, action_distribution=from_gumbel, **fields)
    rates = {"learning_rate": 0.01, "final_learning_rate": 0.01}
    state = jax.jit(example.init)(jax.random.key(0))
    library_init = functools.partial(make_init(config), hyperparams=Hyperparams(**rates, **hyperparams))
    library_state = jax.jit(library_init)(jax.random.key(0), params=state.params)
    train_step, library_step = jax.jit(example.train_step), jax.jit(make_train_step(config))
    before = state.params
    for _ in range(2):
        state, metrics = train_step(state)
        library_state, library_metrics = library_step(library_state)
        assert np.allclose(metrics["episode/return_mean"], library_metrics["episode/return_mean"], rtol=1e-6)
        for ours, theirs in zip(*map(jax.tree.leaves, (library_state.params, state.params)), strict=True):
            assert np.allclose(ours, theirs, rtol=0, atol=1e-6)
    changes = jax.tree.map(lambda new, old: np.abs(np.subtract(new, old)).max(), state.params, before)
    assert max(jax.tree.leaves(changes)) > 0.01


def test_the_ppo_example_equals_the_library(monkeypatch):
    env, limit = SameStart(), 12
    params = env.default_params.replace(max_steps_in_episode=limit)
    example = load("ppo_single_file", ENV=env, ENV_PARAMS=params, NUM_ENVS=8, NUM_STEPS=20, **SMALL)
    assert_equal_to_the_library(
        *(example, monkeypatch, {"value_clip": jnp.inf, "entropy_coef": 0.01}),
        **{"environment": env, "algorithm": PPO, "env_params": {"max_steps_in_episode": limit}},
        **{"num_envs": 8, "num_steps": 20},
    )


def test_the_grpo_example_equals_the_library(monkeypatch):
    env = CartPole()
    params = env.default_params.replace(max_steps_in_episode=20)
    example = load("grpo_single_file", ENV_PARAMS=params, NUM_GROUPS=2, GROUP_SIZE=4, KL_COEF=0.1, **SMALL)
    assert_equal_to_the_library(
        *(example, monkeypatch, {"kl_coef": 0.1}),
        **{"algorithm": with_reference(GRPO), "env_params": {"max_steps_in_episode": 20}},
        **{"num_envs": 8, "group_size": 4},
    )


def test_the_losses_written_out_equal_the_library_s():
    """On random steps of a random policy: half of the ratios are beyond the clip, some steps of GRPO are masked."""
    grpo, ppo = load("grpo_single_file", KL_COEF=0.1, NUM_MINIBATCHES=1), load("ppo_single_file")
    draws, valid = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32), np.arange(64) < 48
    step = {"observation": draws[:4].T, "action": jnp.arange(64) % 2, "log_prob": 0.4 * draws[4] - 0.7}
    of_grpo = grpo.Batch(**step, advantage=draws[5], reference_log_prob=draws[6] - 2, valid=valid, weight=valid / 48)
    of_ppo = ppo.Batch(**step, advantage=draws[5], target=draws[7])

    @jax.jit
    def losses(key):
        params = jax.tree.map(lambda leaf: 0.5 * jax.random.normal(key, leaf.shape), ppo.init(key).params)
        log_probs, values = ppo.log_probs_of(params, draws[:4].T), ppo.value_of(params, draws[:4].T)
        log_prob, entropy = ppo.chosen(log_probs, step["action"]), -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
        given, of_critic = (log_prob, step["log_prob"]), (whiten(draws[5]), values, values, draws[7], entropy)
        library_grpo = grpo_loss(*given, draws[5], valid, reference_log_prob=draws[6] - 2, kl_coef=0.1)[0]
        library = library_grpo, ppo_loss(*given, *of_critic, value_clip=None)[0]
        return (grpo.loss(params, of_grpo)[0], ppo.loss(params, of_ppo)[0]), library

    np.testing.assert_allclose(*losses(jax.random.key(0)), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo_single_file", "grpo_single_file"])
def test_an_example_learns_to_balance_the_pole(name):
    example = load(name)
    _, metrics = jax.jit(jax.vmap(example.train))(jax.random.split(jax.random.key(1), 4))
    assert metrics["episode/return_mean"][:, -5:].mean() > 450

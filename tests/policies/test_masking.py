"""Illegal actions: masks, top-k and top-p of logits; never taken, and masked alike in rollout and update."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilation import compiled
from gymnax.environments import spaces
from probes import Probe
from small import begin

from grpo_jax import GRPO, Config, Hyperparams, make_init, make_train_step
from grpo_jax.algorithms import with_reference
from grpo_jax.policies import MLP, categorical
from grpo_jax.policies.sampling import mask_actions, most_probable
from grpo_jax.rollouts.rollout import Simulator


class Forbidding(Probe):
    """Three actions: the one that equals the age modulo 3 is illegal and has reward -1, the others 1."""

    def action_space(self, params):
        return spaces.Discrete(3)

    def step_env(self, key, state, action, params):
        reward = jnp.where(action == state.time % 3, -1.0, 1.0)
        observation, state, _, terminated, info = super().step_env(key, state, 0, params)
        return observation, state, reward, terminated, info

    def action_mask(self, state, params):
        return jnp.arange(3) != state.time % 3


def config(algorithm, **settings):
    sizes = {"num_envs": 8, "num_epochs": 1, "num_minibatches": 1, "network": MLP((8,))}
    return Config(Forbidding(), algorithm, env_params={"max_steps_in_episode": 6}, **sizes | settings)


@pytest.mark.parametrize(
    "algorithm, settings",
    [(with_reference(GRPO), {"group_size": 4}), pytest.param("ppo", {"num_steps": 9}, marks=pytest.mark.slow)],
)
def test_rollout_and_update_mask_alike(algorithm, settings):
    settings = config(algorithm, **settings)
    state = jax.jit(make_init(settings))(jax.random.key(0), Hyperparams(learning_rate=0.03, entropy_coef=0.01))
    # The policy prefers one action, which is illegal in a third of the states.
    state.params["actor"]["Dense_1"]["bias"] += jnp.array([4.0, 0.0, 0.0])
    step = jax.jit(make_train_step(settings))
    for iteration in range(3):
        before, (state, metrics) = state, step(state)
        # Every step has reward 1: no illegal action was taken.
        assert metrics["episode/return_min"] == metrics["episode/return_max"] == 6
        assert metrics["optim/skipped_updates"] == 0
        np.testing.assert_allclose(metrics["policy/ratio_max"], 1.0, atol=1e-5)
        np.testing.assert_allclose(metrics["policy/kl_behaviour"], 0.0, atol=1e-6)
        assert all(np.isfinite(value) for value in metrics.values()), metrics
        if iteration == 0:
            assert 0.0 < metrics["policy/entropy"] < np.log(2) + 1e-5, "two legal actions"
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (before.params, state.params)), strict=True))


def test_the_trajectory_stores_the_mask():
    settings = config("grpo", group_size=8)
    state = begin(settings)

    @jax.jit
    def play(state, key):
        simulator = Simulator(settings.env, settings.policy, state.params)
        start = settings.algorithm.start.begin(simulator, state.rollout, key, 8)
        return simulator.unroll(start, key, num_steps=6, auto_reset=False)[1]

    trajectory = jax.device_get(play(state, jax.random.key(1)))
    illegal = np.arange(3) == (np.arange(6) % 3)[:, None, None]
    assert np.array_equal(trajectory.action_mask, np.broadcast_to(~illegal, (6, 8, 3)))
    assert np.array_equal(np.isneginf(trajectory.distribution), ~trajectory.action_mask)
    assert not (trajectory.reward == -1).any()


RNG = np.random.default_rng(0)


def test_an_illegal_action_has_no_probability_and_no_gradient():
    logits, mask = RNG.normal(size=(50, 4)).astype(np.float32), RNG.random((50, 4)) < 0.6
    mask[:, 0] = True
    family = compiled(categorical(4))
    masked = mask_actions(logits, mask)
    action = family.sample(masked, jax.random.key(0))
    assert mask[np.arange(50), action].all() and mask[np.arange(50), family.mode(masked)].all()

    def total(logits):
        masked = mask_actions(logits, mask)
        other = mask_actions(jnp.zeros_like(logits), mask)
        kl = family.kl(masked, other) + family.kl(other, masked)
        return jnp.sum(family.log_prob(masked, action) + family.entropy(masked) + kl)

    value, gradient = jax.jit(jax.value_and_grad(total))(logits)
    gradient = np.asarray(gradient)
    assert np.isfinite(value) and np.isfinite(gradient).all()
    assert not gradient[~mask].any() and gradient[mask].any()
    legal = np.where(mask, np.exp(np.asarray(logits, np.float64)), 0.0)
    expected = np.log((legal / legal.sum(1, keepdims=True))[np.arange(50), action])
    np.testing.assert_allclose(family.log_prob(masked, action), expected, rtol=1e-5, atol=1e-6)


def test_states_without_legal_actions_or_mask_stay_unmasked():
    logits = jnp.ones((2, 3))
    assert mask_actions(logits, None) is logits
    masked = mask_actions(logits, jnp.array([[False] * 3, [True, False, True]]))
    assert masked.tolist() == [[1.0, 1.0, 1.0], [1.0, -np.inf, 1.0]]


def test_top_k_and_top_p_keep_the_fewest_tokens_with_the_mass():
    keep = jax.jit(most_probable)
    probabilities = np.float32([[0.1, 0.4, 0.2, 0.25, 0.05], [0.2, 0.2, 0.2, 0.2, 0.2], [0.0, 1.0, 0.0, 0.0, 0.0]])
    with np.errstate(divide="ignore"):
        logits = np.log(probabilities)

    def kept(top_k=np.inf, top_p=1.0, min_p=0.0):
        return [np.flatnonzero(row).tolist() for row in np.asarray(keep(logits, float(top_k), top_p, min_p))]

    assert kept() == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [1]]
    assert kept(top_p=0.0) == kept(top_k=1) == [[1], [0], [1]]
    assert kept(top_p=0.6) == [[1, 3], [0, 1, 2], [1]]
    assert kept(top_p=0.7) == [[1, 2, 3], [0, 1, 2, 3], [1]]
    assert kept(top_k=2) == [[1, 3], [0, 1], [1]]
    # Top-p renormalises over the top k: 0.4 / 0.85 < 0.6 <= 0.65 / 0.85.
    assert kept(top_k=3, top_p=0.6) == [[1, 3], [0, 1], [1]]
    # Min-p is relative to the most probable token, 0.4, whatever top-k and top-p leave.
    assert kept(min_p=0.45) == [[1, 2, 3], [0, 1, 2, 3, 4], [1]]
    assert kept(min_p=0.45, top_p=0.6) == kept(min_p=0.6, top_p=0.6) == [[1, 3], [0, 1, 2], [1]]
    assert kept(min_p=1.0) == [[1], [0, 1, 2, 3, 4], [1]]
    draws = 3 * np.random.default_rng(0).normal(size=(200, 30)).astype(np.float32)
    probabilities = np.exp(draws) / np.exp(draws).sum(axis=1, keepdims=True)
    mask = np.asarray(keep(draws, np.inf, 0.8))
    mass = np.sum(probabilities, axis=1, where=mask)
    least = np.min(probabilities, axis=1, where=mask, initial=1.0)
    assert (mass >= 0.8 - 1e-6).all() and (mass - least < 0.8).all()

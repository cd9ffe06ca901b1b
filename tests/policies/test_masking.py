"""Illegal actions: never taken, without gradient, and masked in the same way in rollout and update."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import spaces
from probes import Probe

from grpo_jax import GRPO, Config, Hyperparams, make_init, make_train_step
from grpo_jax.algorithms import with_reference
from grpo_jax.environments import make_environment
from grpo_jax.policies.distributions import categorical
from grpo_jax.policies.sampling import mask_actions
from grpo_jax.rollouts.rollout import unroll

RNG = np.random.default_rng(0)


class Tempting(Probe):
    """Three actions: the one that equals the age modulo 3 has reward -1, the others 1."""

    def action_space(self, params):
        return spaces.Discrete(3)

    def step_env(self, key, state, action, params):
        reward = jnp.where(action == state.time % 3, -1.0, 1.0)
        observation, state, _, terminated, info = super().step_env(key, state, 0, params)
        return observation, state, reward, terminated, info


class Forbidding(Tempting):
    """`Tempting`, with the action of reward -1 illegal."""

    def action_mask(self, state, params):
        return jnp.arange(3) != state.time % 3


def test_an_illegal_action_has_no_probability_and_no_gradient():
    logits = jnp.asarray(RNG.normal(size=(50, 4)), jnp.float32)
    mask = jnp.asarray(RNG.random((50, 4)) < 0.6).at[:, 0].set(True)
    family = categorical(4)
    masked = mask_actions(logits, mask)
    action = family.sample(masked, jax.random.key(0))
    assert np.asarray(mask)[np.arange(50), action].all()
    assert np.asarray(mask)[np.arange(50), family.mode(masked)].all()

    def total(logits):
        masked = mask_actions(logits, mask)
        other = mask_actions(jnp.zeros_like(logits), mask)
        kl = family.kl(masked, other) + family.kl(other, masked)
        return jnp.sum(family.log_prob(masked, action) + family.entropy(masked) + kl)

    gradient = jax.grad(total)(logits)
    assert np.isfinite(total(logits)) and np.isfinite(gradient).all()
    assert not gradient[~mask].any() and gradient[mask].any()
    legal = np.where(mask, np.exp(np.asarray(logits, np.float64)), 0.0)
    expected = np.log((legal / legal.sum(1, keepdims=True))[np.arange(50), action])
    np.testing.assert_allclose(family.log_prob(masked, action), expected, rtol=1e-5, atol=1e-6)


def test_neither_a_state_without_legal_actions_nor_one_without_a_mask_is_masked():
    logits = jnp.ones((2, 3))
    assert mask_actions(logits, None) is logits
    masked = mask_actions(logits, jnp.array([[False] * 3, [True, False, True]]))
    assert masked.tolist() == [[1.0, 1.0, 1.0], [1.0, -np.inf, 1.0]]


def config(environment, algorithm, **settings):
    return Config(
        environment=environment, algorithm=algorithm, num_envs=8, num_epochs=1, num_minibatches=1, hidden_sizes=(8,),
        env_params={"max_steps_in_episode": 6}, **settings,
    )  # fmt: skip


@pytest.mark.parametrize("algorithm, settings", [(with_reference(GRPO), {"group_size": 4}), ("ppo", {"num_steps": 9})])
def test_rollout_and_update_mask_alike(algorithm, settings):
    settings = config(Forbidding(), algorithm, **settings)
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
    for environment, masked in ((Forbidding(), True), (Tempting(), False)):
        settings = config(environment, "grpo", group_size=8)
        state = jax.jit(make_init(settings))(jax.random.key(0), Hyperparams())
        begin, key = settings.algorithm.start.begin, jax.random.key(1)
        start = begin(state.rollout, settings.policy, state.params, settings.env, key, 8, 8)
        _, trajectory = unroll(settings.policy, settings.env, state.params, start, key, num_steps=6, auto_reset=False)
        illegal = np.arange(3) == (np.arange(6) % 3)[:, None, None]
        if masked:
            assert np.array_equal(trajectory.action_mask, np.broadcast_to(~illegal, (6, 8, 3)))
            assert np.array_equal(np.isneginf(trajectory.distribution), ~trajectory.action_mask)
        else:
            assert trajectory.action_mask is None
        assert (trajectory.reward == -1).any() != masked


def test_only_an_environment_with_masks_has_one():
    assert make_environment("CartPole-v1").action_mask is None
    env = make_environment(Forbidding())
    state, _ = env.reset(jax.random.key(0), env.params)
    assert env.action_mask(state, env.params).tolist() == [False, True, True]

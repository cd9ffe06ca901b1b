"""Illegal actions in a run: never taken, and masked in the same way in rollout and update."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import spaces
from probes import Probe
from small import begin

from grpo_jax import GRPO, Config, Hyperparams, make_init, make_train_step
from grpo_jax.algorithms import with_reference
from grpo_jax.policies import MLP
from grpo_jax.rollouts.rollout import Simulator


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


def config(environment, algorithm, **settings):
    return Config(
        environment=environment, algorithm=algorithm, num_envs=8, num_epochs=1, num_minibatches=1, network=MLP((8,)),
        env_params={"max_steps_in_episode": 6}, **settings,
    )  # fmt: skip


@pytest.mark.parametrize(
    "algorithm, settings",
    [(with_reference(GRPO), {"group_size": 4}), pytest.param("ppo", {"num_steps": 9}, marks=pytest.mark.slow)],
)
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
        state = begin(settings)

        @jax.jit
        def play(state, key, settings=settings):
            simulator = Simulator(settings.env, settings.policy, state.params)
            start = settings.algorithm.start.begin(simulator, state.rollout, key, 8)
            return simulator.unroll(start, key, num_steps=6, auto_reset=False)[1]

        trajectory = jax.device_get(play(state, jax.random.key(1)))
        illegal = np.arange(3) == (np.arange(6) % 3)[:, None, None]
        if masked:
            assert np.array_equal(trajectory.action_mask, np.broadcast_to(~illegal, (6, 8, 3)))
            assert np.array_equal(np.isneginf(trajectory.distribution), ~trajectory.action_mask)
        else:
            assert trajectory.action_mask is None
        assert (trajectory.reward == -1).any() != masked

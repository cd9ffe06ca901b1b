"""Suites of rigid bodies, if they are installed: the same interface, the same guarantees."""

import subprocess

import jax
import jax.numpy as jnp
import pytest
from test_other_suites import BROKEN_IN_BRAX

from grpo_jax.environments import make_environment
from grpo_jax.environments.spaces import Box
from grpo_jax.environments.suites.physics import Playground
from grpo_jax.errors import ConfigError


@pytest.mark.slow
def test_brax_leaves_the_state_that_it_is_given_unchanged():
    pytest.importorskip("brax")
    env = make_environment("brax:ant")
    state, _ = jax.eval_shape(env.reset, jax.random.key(0), env.params)
    action = jnp.zeros(len(env.action_space.low))
    after = jax.eval_shape(lambda state: env.step(jax.random.key(0), state, action, env.params).state, state)
    assert after == state and "reward_survive" in state.inner.metrics  # which it writes a float for


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN_IN_BRAX)
def test_tasks_that_brax_itself_cannot_step_are_errors(name):
    env = pytest.importorskip("brax.envs").get_environment(name)
    with pytest.raises(TypeError, match="a_min"):
        jax.eval_shape(lambda key: env.step(env.reset(key), jnp.zeros(env.action_size)), jax.random.key(0))
    with pytest.raises(ConfigError, match=f"'brax:{name}' cannot be stepped"):
        make_environment(f"brax:{name}")


@pytest.mark.slow
def test_the_control_suite_of_playground_needs_no_download():
    registry = pytest.importorskip("mujoco_playground").registry
    for name in registry.dm_control_suite.ALL_ENVS:
        env = make_environment(f"playground:{name}")
        assert env.max_steps == 1000 and isinstance(env.action_space, Box)


class Counter:
    """A task of Playground that counts its steps in an observation of two arrays, and writes into its state."""

    action_size = 2

    def reset(self, key):
        from mujoco_playground import State

        return State(None, {"state": jnp.zeros(1), "privileged_state": jnp.zeros(2)}, *jnp.zeros(2), {}, {"count": 0})

    def step(self, state, action):
        state.info["count"] = state.info["count"] + 1
        count = state.info["count"]
        obs = {"state": jnp.full(1, count, float), "privileged_state": jnp.full(2, count, float)}
        return state.replace(obs=obs, reward=count * jnp.sum(action), done=jnp.float32(count >= 6))


@pytest.mark.slow  # the import
def test_actions_are_repeated_and_observations_may_be_dicts(monkeypatch):
    registry = pytest.importorskip("mujoco_playground").registry
    settings = pytest.importorskip("ml_collections").ConfigDict({"episode_length": 7, "action_repeat": 2})
    monkeypatch.setattr(registry, "get_default_config", lambda name: settings)
    monkeypatch.setattr(registry, "load", lambda name, config_overrides: Counter())
    env = make_environment(Playground("CartpoleBalance"))
    assert env.max_steps == 4 and env.observation["privileged_state"].shape == (2,)
    state, _ = env.reset(jax.random.key(0), env.params)
    rewards, ends = [], []
    for _ in range(3):
        moved = env.step(jax.random.key(0), state, jnp.array([0.25, 0.25]), env.params)
        state = moved.state
        rewards.append(float(moved.reward))
        ends.append(bool(moved.terminated))
    assert rewards == [0.5 * (1 + 2), 0.5 * (3 + 4), 0.5 * (5 + 6)] and ends == [False, False, True]
    assert moved.observation["state"] == 6 and state.time == 3


@pytest.mark.slow  # the import
def test_robots_that_cannot_be_downloaded_are_an_error(monkeypatch):
    registry = pytest.importorskip("mujoco_playground").registry

    def fail(name, config_overrides):
        raise subprocess.CalledProcessError(128, ["git", "clone"])

    monkeypatch.setattr(registry, "load", fail)
    with pytest.raises(ConfigError, match="'playground:Go1Getup' needs the robots of mujoco_menagerie"):
        make_environment("playground:Go1Getup")

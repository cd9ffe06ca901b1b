"""Suites of rigid bodies, if they are installed: the same interface, the same guarantees."""

import subprocess
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from small import small_config

from grpo_jax import Hyperparams, make_init, make_train_step
from grpo_jax.environments import make_environment
from grpo_jax.environments.suites import NAMES, SUITES
from grpo_jax.environments.suites.physics import Playground, RigidBodies, in_float32
from grpo_jax.errors import ConfigError


def test_physics_multiplies_in_float32_unless_told_otherwise():
    product = in_float32(jnp.matmul)

    def precision():
        return jax.make_jaxpr(lambda x: product(x, x))(jnp.ones((2, 2))).eqns[0].params["precision"]

    assert precision() == (jax.lax.Precision.HIGHEST,) * 2
    with jax.default_matmul_precision("tensorfloat32"):
        assert precision() == (jax.lax.Precision.HIGH,) * 2


@pytest.mark.slow
def test_brax_leaves_the_state_that_it_is_given_unchanged():
    pytest.importorskip("brax")
    env = make_environment("brax:ant")
    state, _ = jax.eval_shape(env.reset, jax.random.key(0), env.params)
    action = jnp.zeros(len(env.action_space.low))
    after = jax.eval_shape(lambda state: env.step(jax.random.key(0), state, action, env.params).state, state)
    assert after == state and "reward_survive" in state.inner.metrics  # which it writes a float for


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


@pytest.mark.parametrize("error", [OSError(28, "a full disk"), subprocess.CalledProcessError(128, ["git", "clone"])])
def test_what_cannot_be_downloaded_is_an_error(monkeypatch, error):
    monkeypatch.setitem(SUITES, "playground", mock.Mock(side_effect=error))
    monkeypatch.setitem(NAMES, "playground", lambda: ["Go1Getup"])
    with pytest.raises(ConfigError, match="needs data that could not be downloaded: .*(disk|clone)"):
        make_environment("playground:Go1Getup")


# --- domain randomisation --------------------------------------------------------------------------------------------


@struct.dataclass
class Model:
    gravity: jax.Array
    masses: jax.Array
    num_bodies: int = 2

    def tree_replace(self, values):
        return self.replace(**values)


class Falling(RigidBodies):
    """Two bodies that fall at the speed of the model's gravity; pays the mean height."""

    name, model_field = "falling", "model"

    def __init__(self):
        super().__init__(types.SimpleNamespace(action_size=1, model=Model(jnp.float32(-1.0), jnp.ones(2))), 3)

    def reset_env(self, key, params):
        return jnp.zeros(2), jnp.zeros(3)

    def is_truncated(self, state, params):
        return state[2] >= params.max_steps_in_episode

    def step_env(self, key, state, action, params):
        state = state + jnp.append(self.inner.model.gravity * jnp.ones(2), 1.0)
        return state[:2], state, jnp.mean(state[:2]), False, {}


def test_each_group_falls_under_its_own_gravity():
    fields = {"num_envs": 6, "group_size": 2, "env_params": {"gravity": None, "masses": 2.0}}
    config = small_config("grpo", Falling(), **fields)
    assert {name: value.tolist() for name, value in config.env.params.items()} == {"gravity": -1, "masses": [2, 2]}
    init, step = jax.jit(make_init(config)), jax.jit(make_train_step(config))
    for gravity in ([-1.0, -2.0, 3.0], [0.5, 0.5, 0.5]):
        state = init(jax.random.key(0), Hyperparams(), {"gravity": jnp.array(gravity)})
        state, metrics = step(state)  # heights after 1, 2 and 3 steps: gravity times 6 in all
        np.testing.assert_allclose(metrics["episode/return_mean"], 6 * np.mean(gravity), rtol=1e-6)
        assert metrics["group/zero_variance_fraction"] == 1
    assert step._cache_size() == 1
    assert make_environment(Falling()).params == {} and float(config.environment.inner.model.gravity) == -1.0


def test_fields_that_a_model_does_not_have_are_errors():
    with pytest.raises(ConfigError, match="has no real numbers 'gravit': did you mean 'gravity'"):
        make_environment(Falling(), {"gravit": None})
    with pytest.raises(ConfigError, match=r"masses has shape \(2,\), but was given shape \(3,\)"):
        make_environment(Falling(), {"masses": [1.0, 2.0, 3.0]})


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, mass", [("brax:inverted_pendulum", "link.inertia.mass"), ("playground:CartpoleBalance", "body_mass")]
)
def test_a_heavier_model_moves_less(name, mass):
    pytest.importorskip({"brax": "brax"}.get(name.partition(":")[0], "mujoco_playground"))
    plain, env = make_environment(name), make_environment(name, {mass: None})
    state, start = env.reset(jax.random.key(0), env.params)
    moved = jax.jit(
        lambda scale: env.step(None, state, jnp.ones(1), {mass: scale * env.params[mass]}).observation - start
    )
    usual = plain.step(None, state, jnp.ones(1), {}).observation - start
    np.testing.assert_allclose(moved(1.0), usual, atol=1e-6)
    assert np.linalg.norm(moved(3.0)) < 0.8 * np.linalg.norm(usual)

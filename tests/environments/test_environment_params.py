"""Traced environment parameters: one value for each group, kept through resets and rollouts, swept by vmap."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from gymnax.environments import spaces
from probes import Probe, ProbeParams, difference, known_params, known_policy
from small import small_config

from grpo_jax import Hyperparams, evaluate, make_init, make_train_step, run
from grpo_jax.environments import group_parameters, make_environment, row_parameters
from grpo_jax.errors import ConfigError
from grpo_jax.groups import fresh_groups
from grpo_jax.rollouts.rollout import Simulator


def test_each_environment_has_its_own_physics():
    env, gravities = make_environment("CartPole-v1"), jnp.array([1.0, 9.8, 30.0])
    state, _ = jax.jit(env.reset)(jax.random.key(0), env.params)
    step = jax.jit(jax.vmap(lambda gravity: env.step(None, state, 1, env.params | {"gravity": gravity})))
    together = np.asarray(step(gravities).observation)
    for seen, gravity in zip(together, gravities.tolist(), strict=True):
        alone = make_environment("CartPole-v1", {"gravity": gravity})
        moved = jax.jit(alone.step)(None, state, 1, alone.params)
        np.testing.assert_allclose(seen, moved.observation, rtol=1e-5, atol=1e-6)
    assert len(set(together[:, 3].tolist())) == 3


probe = make_environment(Probe(), {"max_steps_in_episode": 6})
LIFETIMES = jnp.array([1, 2, 3, 99])


def test_resets_in_a_rollout_have_the_environments_parameters():
    params = group_parameters(probe, {"lifetime": LIFETIMES}, 4, 1)
    simulator = Simulator(probe, known_policy, known_params((0.0, 0.0)))
    start = simulator.reset(params, jax.random.key(0), 4)
    play = jax.jit(functools.partial(simulator.unroll, num_steps=12, auto_reset=True))
    state, trajectory = jax.tree.map(np.asarray, play(start, jax.random.key(1)))
    steps = 1 + np.arange(12)[:, None]
    assert np.array_equal(trajectory.terminated, (steps % LIFETIMES == 0))
    assert np.array_equal(trajectory.truncated, (steps % 6 == 0) & (np.asarray(LIFETIMES) == 99))
    assert not difference(state.environment_params, start.environment_params)


def test_members_of_a_group_share_their_parameters_and_keep_them():
    params = group_parameters(probe, {"lifetime": LIFETIMES, "bonus": 0.25}, 4, 3)
    assert params["lifetime"].tolist() == [1] * 3 + [2] * 3 + [3] * 3 + [99] * 3
    assert params["bonus"].tolist() == [0.25] * 12
    assert [params[name].dtype for name in ("lifetime", "bonus", "nan_below")] == [jnp.int32, jnp.float32, jnp.float32]
    simulator = Simulator(probe, known_policy, None)
    state = simulator.reset(params, jax.random.key(0), 12, group_size=3)
    again = fresh_groups(simulator, state, jax.random.key(1), 3)
    for start in (state, again):
        assert start.environment.lifetime.tolist() == params["lifetime"].tolist()
        assert start.environment_params["lifetime"].tolist() == params["lifetime"].tolist()
    assert not np.array_equal(state.observation, again.observation)


def config(algorithm="grpo", **settings):
    return small_config(algorithm, Probe(), env_params={"max_steps_in_episode": 4}, **settings)


def test_a_run_keeps_its_parameters_and_is_evaluated_under_them():
    settings = config(group_size=2)
    init, train_step = jax.jit(make_init(settings)), jax.jit(make_train_step(settings))
    state = init(jax.random.key(0), Hyperparams(), {"lifetime": jnp.array([1, 2, 3, 4])})
    for _ in range(2):
        state, metrics = train_step(state)
        assert (metrics["episode/length_min"], metrics["episode/length_max"]) == (1, 4)
        assert metrics["environment/steps"] == 2 * (1 + 2 + 3 + 4)
    play = jax.jit(functools.partial(evaluate, settings, num_episodes=16))
    assert play(state, jax.random.key(1)).lengths.tolist() == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4


@pytest.mark.slow
def test_each_row_of_a_run_has_its_own_parameters():
    settings, keys = config("ppo", num_steps=8), jax.random.split(jax.random.key(0), 2)
    hyperparams = Hyperparams(total_steps=128.0)
    together = run(settings, hyperparams, keys, env_params={"lifetime": jnp.array([1, 3]), "bonus": 2.0})
    assert together.metrics["episode/length_mean"].tolist() == [[1.0, 3.0]] * 2
    assert together.metrics["episode/return_max"].tolist() == [[3.0, 9.0]] * 2
    assert together.states.rollout.environment_params["lifetime"].tolist() == [[1] * 8, [3] * 8]


def test_parameters_may_differ_by_row_and_by_group():
    with pytest.raises(ConfigError, match="'lifetime' has 3 rows instead of 2"):
        row_parameters(probe, {"lifetime": jnp.array([1, 2, 3])}, 2)
    given = {"bonus": 2.0, "lifetime": jnp.array([1, 3]), "nan_below": jnp.array([[0.0, 1.0], [2.0, 3.0]])}
    rows = row_parameters(probe, given, 2)
    assert [rows[name].tolist() for name in given] == [[2.0, 2.0], [1, 3], [[0.0, 1.0], [2.0, 3.0]]]
    acrobot = make_environment("Acrobot-v1")
    assert row_parameters(acrobot, {"available_torque": jnp.arange(3.0)}, 2)["available_torque"].shape == (2, 3)


def test_the_callers_arrays_are_not_donated():
    lifetime = jnp.full(8, 2)
    state = jax.jit(make_init(config("ppo", num_steps=8)))(jax.random.key(0), Hyperparams(), {"lifetime": lifetime})
    jax.jit(lambda state: state, donate_argnums=0)(state)
    assert lifetime.tolist() == [2] * 8


@struct.dataclass
class SizedParams(ProbeParams):
    width: int = 3  # a shape
    twice: bool = True  # a branch
    label: str = "a label"
    scale: float = 1.0
    endless: float = np.inf
    fixed: float = struct.field(pytree_node=False, default=2.0)


class Sized(Probe):
    PARAMS = SizedParams()

    def reset_env(self, key, params):
        _, state = super().reset_env(key, params)
        return self.look(state, params), state

    def step_env(self, key, state, action, params):
        _, state, *rest = super().step_env(key, state, action, params)
        return self.look(state, params), state, *rest

    def look(self, state, params):
        return jnp.full(params.width, state.time * params.scale * params.fixed * (2 if params.twice else 1))

    def action_space(self, params):
        return spaces.Discrete(params.width)


def test_parameters_that_decide_shapes_or_branches_are_static():
    env = make_environment(Sized(), {"width": 5.0, "label": "another"})
    assert set(env.params) == {"lifetime", "bonus", "nan_below", "scale", "endless"}
    assert env.observation.shape == (5,) and env.action_space.num_actions == 5
    state, _ = env.reset(jax.random.key(0), env.params)
    moved = jax.jit(env.step)(jax.random.key(0), state, 0, env.params | {"scale": jnp.float32(3.0)})
    assert moved.observation.tolist() == [12.0] * 5
    assert make_environment(Sized(), {"twice": 0.0}).step(None, state, 0, env.params).observation.tolist() == [2.0] * 3
    assert make_environment(Sized(), {"endless": np.inf}).params["endless"] == np.inf, "as its default"


def test_errors_name_the_nearest_correct_value():
    init = make_init(config("ppo", num_steps=8))
    for name, value, message in (
        ("lifetim", 2, "no traced parameter 'lifetim': did you mean 'lifetime'"),
        ("max_steps_in_episode", 2, r"the time limit.*are static: Config\(env_params=...\)"),
        ("lifetime", 1.5, "'lifetime' is int32, but was given float32"),
        ("lifetime", jnp.ones(3, int), r"shape \(3,\); use \(\) for all groups, or \(8,\) with a value"),
    ):
        with pytest.raises(ConfigError, match=message):
            init(jax.random.key(0), Hyperparams(), {name: value})
    refused = {"lifetime": (1.5, "a whole number"), "twice": (0.5, "0 or 1"), "label": (1, "a text")}
    refused |= {"scale": (np.inf, "a finite number"), "bonus": (np.nan, "a finite number")}
    for name, (value, kind) in refused.items():
        with pytest.raises(ConfigError, match=f"{name}={value!r} must be {kind}"):
            make_environment(Sized(), {name: value})

"""Environments by name: gymnax's own numbers behind one interface, of one type from step to step."""

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import Probe, difference

from grpo_jax.environments import make_environment
from grpo_jax.spaces import Discrete

VARIED = ["CartPole-v1", "Acrobot-v1", "Catch-bsuite", "UmbrellaChain-bsuite", "FourRooms-misc", "Breakout-MinAtar"]


def test_cartpole_is_gymnax_cartpole_bitwise():
    env, (original, params) = make_environment("CartPole-v1"), gymnax.make("CartPole-v1")
    key = jax.random.key(3)
    state, observation = env.reset(key)
    expected_observation, expected = original.reset_env(key, params)
    assert np.array_equal(observation, expected_observation)
    for t in range(60):
        key, action = jax.random.key(t), t % 3 // 2
        moved = env.step(key, state, action)
        expected_observation, expected, reward, terminated, _ = original.step_env(key, expected, action, params)
        assert np.array_equal(moved.observation, expected_observation)
        assert np.array_equal(jax.tree.leaves(moved.environment), jax.tree.leaves(expected))
        assert (float(moved.reward), bool(moved.terminated)) == (float(reward), bool(terminated))
        assert not moved.truncated
        state = moved.environment
        if moved.terminated:
            break
    assert moved.terminated, "the actions were chosen to drop the pole"


def test_the_time_limit_truncates_at_its_step_and_can_be_overridden():
    assert make_environment("CartPole-v1").max_steps == 500
    # A command line makes floats of all numbers; the limit stays an integer.
    env = make_environment("CartPole-v1", {"max_steps_in_episode": 3.0, "gravity": 1})
    assert env.max_steps == 3 and isinstance(env.max_steps, int)
    state, _ = env.reset(jax.random.key(0))
    flags = []
    for t in range(3):
        moved = env.step(jax.random.key(t), state, t % 2)
        flags.append((bool(moved.terminated), bool(moved.truncated)))
        state = moved.environment
    assert flags == [(False, False), (False, False), (False, True)]


def test_overrides_reach_the_physics():
    light, heavy = (make_environment("CartPole-v1", {"gravity": g}) for g in (1.0, 20.0))
    state, _ = light.reset(jax.random.key(0))
    speeds = [env.step(jax.random.key(0), state, 0).environment.theta_dot for env in (light, heavy)]
    assert speeds[0] != speeds[1]


def test_an_object_with_gymnax_interface_is_an_environment():
    env = make_environment(Probe(), {"lifetime": 2})
    assert (env.name, env.action_space, env.max_steps, env.observation.shape) == ("Probe", Discrete(2), 3, (2,))
    state, _ = env.reset(jax.random.key(0))
    assert not env.step(jax.random.key(0), state, 0).terminated
    assert env.step(jax.random.key(0), state.replace(time=jnp.int32(1)), 0).terminated


@pytest.mark.parametrize("name", VARIED)
def test_types_are_strong_and_stay_from_step_to_step(name):
    env = make_environment(name)
    state, observation = jax.eval_shape(env.reset, jax.random.key(0))
    moved = jax.eval_shape(env.step, jax.random.key(0), state, jax.ShapeDtypeStruct((), jnp.int32))
    again = jax.eval_shape(env.step, jax.random.key(0), moved.environment, jax.ShapeDtypeStruct((), jnp.int32))
    for leaf in jax.tree.leaves((state, observation, moved, again)):
        assert not leaf.weak_type
    states = (state, moved.environment, again.environment)
    types = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), s) for s in states]
    assert types[0] == types[1] == types[2]
    assert (observation.shape, observation.dtype) == (moved.observation.shape, moved.observation.dtype)
    assert (observation.shape, observation.dtype) == (env.observation.shape, env.observation.dtype)
    # UmbrellaChain pays in integers.
    assert (moved.reward.dtype, moved.terminated.dtype, moved.truncated.dtype) == (jnp.float32, bool, bool)


def test_reset_is_a_function_of_its_key():
    env = make_environment("CartPole-v1")
    assert not difference(env.reset(jax.random.key(1)), env.reset(jax.random.key(1)))
    assert difference(env.reset(jax.random.key(1)), env.reset(jax.random.key(2)))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("CartPole-v2",), "unknown environment 'CartPole-v2': did you mean 'CartPole-v1'"),
        (("cartpole",), "did you mean 'CartPole-v1'"),
        (("breakout-minatar",), "did you mean 'Breakout-MinAtar'"),
        (("???",), "known: .*CartPole-v1"),
        (("CartPole-v1", {"max_steps": 20}), "no parameter 'max_steps': did you mean 'max_steps_in_episode'"),
        (("CartPole-v1", {"Gravity": 20}), "did you mean 'gravity'"),
        (("Pendulum-v1",), "'Pendulum-v1' has Box actions.*choose an environment with discrete actions"),
    ],
)
def test_mistakes_are_told_with_what_was_meant(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_environment(*arguments)

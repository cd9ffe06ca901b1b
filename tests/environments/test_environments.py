"""Environments by name: the same numbers as gymnax, behind one interface with fixed dtypes."""

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import difference, random_play

from grpo_jax.environments import make_environment


@pytest.mark.parametrize("name, dtype", [("CartPole-v1", jnp.float32), ("Breakout-MinAtar", jnp.int8)])
def test_steps_and_resets_are_gymnax_s_bitwise(name, dtype):
    """Also where bytes are observed."""
    env, (original, params) = make_environment(name), gymnax.make(name)

    @jax.jit
    def play(key):
        state, first = env.reset(key, env.params)
        theirs, expected = original.reset_env(key, params)

        def step(states, t):
            key, action = jax.random.key(t), t % 3 // 2  # chosen to drop the pole
            moved = env.step(key, states[0], action, env.params)
            seen, state, reward, terminated, _ = original.step_env(key, states[1], action, params)
            state = jax.tree.map(lambda new, old: jnp.asarray(new, jnp.result_type(old)), state, states[1])
            ours = moved.observation, moved.reward, moved.terminated
            return (moved.state, state), (ours, (seen, reward, terminated))

        ends, both = jax.lax.scan(step, (state, jax.tree.map(jnp.asarray, expected)), jnp.arange(60))
        return (ends[0], first, *both[0]), (ends[1], theirs, *both[1])

    ours, expected = play(jax.random.key(3))
    assert ours[1].dtype == dtype and ours[-1].any(), "an end"
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(ours), jax.tree.leaves(expected))


def test_overrides_are_cast_and_reach_the_physics():
    """The command line parses every number as a float; the limit stays an integer."""
    light, heavy = (make_environment("CartPole-v1", {"gravity": g, "max_steps_in_episode": 3.0}) for g in (1, 20.0))
    assert light.max_steps == 3 and isinstance(light.max_steps, int)
    state, _ = light.reset(jax.random.key(0), light.params)
    speeds = [env.step(jax.random.key(0), state, 0, env.params).state.theta_dot for env in (light, heavy)]
    assert speeds[0] != speeds[1]


LIMIT, NUM_ENVS, NUM_STEPS = 7, 4, 20
NAMES = [name for name in gymnax.registered_envs if name != "MNISTBandit-bsuite"]  # which downloads its images
LIGHT = {"Pendulum-v1", "Breakout-MinAtar", "UmbrellaChain-bsuite"}


@pytest.mark.parametrize(
    "name", [name if name in LIGHT else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_every_gymnax_environment_plays_by_name_and_is_truncated_at_its_limit_alone(name):
    env = make_environment(name, {"max_steps_in_episode": LIMIT})
    play = random_play(env, NUM_ENVS, NUM_STEPS)
    played = before, after, trajectory = play(jax.random.key(1))
    assert not difference(play(jax.random.key(1)), played), "the same key, the same episodes"
    assert set(env.params) == set(vars(gymnax.make(name)[1])) - {"max_steps_in_episode"}, "every number is traced"

    assert trajectory.observation.shape == (NUM_STEPS, NUM_ENVS, *env.observation.shape)
    assert trajectory.observation.dtype == env.observation.dtype
    # The rewards of UmbrellaChain and BernoulliBandit are integers in gymnax.
    assert (trajectory.reward.dtype, trajectory.truncated.dtype) == (jnp.float32, bool)
    assert trajectory.reward.shape == (NUM_STEPS, NUM_ENVS)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(played))
    assert np.isfinite(trajectory.observation).all() and np.isfinite(trajectory.reward).all()

    at_limit = trajectory.episode_length == LIMIT
    assert at_limit.any() or trajectory.terminated.any()
    assert np.array_equal(trajectory.ended & ~trajectory.terminated, at_limit & ~trajectory.terminated)
    assert (trajectory.episode_length <= LIMIT).all()
    assert not (trajectory.terminated & trajectory.truncated).any(), "both at once is a termination"


def test_deep_sea_terminates_where_its_limit_is_reached():
    env = make_environment("DeepSea-bsuite")
    state, _ = jax.jit(env.reset)(jax.random.key(0), env.params)
    flags, step = [], jax.jit(env.step)
    for t in range(8):
        moved = step(jax.random.key(t), state, t % 2, env.params)
        flags.append((bool(moved.terminated), bool(moved.truncated)))
        state = moved.state
    assert flags == [(False, False)] * 7 + [(True, False)]

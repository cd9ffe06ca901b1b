"""Other suites, if they are installed: the same interface, the same guarantees."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import difference, random_play

from grpo_jax.environments import make_environment
from grpo_jax.environments.spaces import Discrete

LIMIT, NUM_ENVS, NUM_STEPS = 6, 3, 14
NAMES = {
    "craftax:Craftax-Classic-Symbolic-v1": (1345,),
    "pgx:minatar-breakout": (10, 10, 4),
    "pgx:2048": (4, 4, 31),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_environment_of_another_suite_plays_and_is_truncated_at_its_limit(name):
    pytest.importorskip(name.partition(":")[0])
    env = make_environment(name, {"max_steps_in_episode": LIMIT})
    assert (env.name, env.observation.shape, env.max_steps) == (name, NAMES[name], LIMIT)

    play = random_play(env, NUM_ENVS, NUM_STEPS)
    before, after, trajectory = play(jax.random.key(0))
    assert not difference(play(jax.random.key(0)), (before, after, trajectory))
    assert not any(getattr(leaf, "weak_type", False) for leaf in jax.tree.leaves((before, after, trajectory)))
    assert np.isfinite(trajectory.observation.astype(jnp.float32)).all() and np.isfinite(trajectory.reward).all()
    at_limit = trajectory.episode_length == LIMIT
    assert np.array_equal(trajectory.truncated, at_limit & ~trajectory.terminated) and trajectory.truncated.any()


def test_moves_of_2048_that_change_nothing_are_illegal():
    pytest.importorskip("pgx")
    env = make_environment("pgx:2048")
    assert env.action_space == Discrete(4)
    state, _ = env.reset(jax.random.key(0), env.params)
    mask = jax.jit(env.action_mask)
    for t in range(20):
        legal = mask(state, env.params)
        assert legal.any()
        moved = jax.jit(env.step)(jax.random.key(t), state, jnp.argmax(legal), env.params)
        assert moved.reward >= 0 and not moved.terminated
        state = moved.state
    assert make_environment("pgx:minatar-breakout").action_mask is None


@pytest.mark.slow
def test_the_parameters_of_craftax_are_traced_and_its_time_limit_truncates():
    pytest.importorskip("craftax")
    env = make_environment("craftax:Craftax-Classic-Symbolic-v1")
    assert env.max_steps == 10_000 and {"zombie_health", "spawn_cow_chance"} <= set(env.params)
    state, _ = env.reset(jax.random.key(0), env.params)
    state = state.replace(timestep=jnp.asarray(9_999, state.timestep.dtype))
    moved = env.step(jax.random.key(0), state, 0, env.params)
    assert moved.truncated and not moved.terminated


@pytest.mark.parametrize(
    "suite, name, message",
    [
        ("craftax", "Craftax-v1", "did you mean 'Craftax-Pixels-v1'|did you mean 'Craftax-Symbolic-v1'"),
        ("pgx", "2084", "did you mean '2048'"),
    ],
)
def test_errors_say_what_is_wrong(suite, name, message):
    pytest.importorskip(suite)
    with pytest.raises(ValueError, match=message):
        make_environment(f"{suite}:{name}")


@pytest.mark.parametrize("suite", ["brax", "craftax", "jumanji", "navix", "pgx", "playground", "xland"])
def test_a_suite_that_is_not_installed_is_named(suite, monkeypatch):
    for module in (suite, "craftax.craftax_env", "mujoco_playground", "xminigrid"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"needs {suite}: pip install 'grpo-jax\[{suite}\]'"):
        make_environment(f"{suite}:any")

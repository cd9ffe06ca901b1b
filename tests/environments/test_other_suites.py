"""Other suites, if they are installed: the same interface, the same guarantees."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import difference, random_play

from grpo_jax.environments import make_environment
from grpo_jax.environments.spaces import Discrete
from grpo_jax.errors import ConfigError

LIMIT, NUM_ENVS, NUM_STEPS = 6, 3, 14
BRAX = {"ant": 27, "fast": 2, "halfcheetah": 17, "hopper": 11, "humanoid": 244, "humanoidstandup": 244, "pusher": 23}
BRAX |= {"inverted_double_pendulum": 8, "inverted_pendulum": 4, "reacher": 11, "walker2d": 17}
BROKEN_IN_BRAX = {"swimmer"}  # brax's own step calls jax.numpy.clip with argument names that JAX 0.10 removed
NAMES = {f"brax:{name}": (size,) for name, size in BRAX.items()} | {
    "craftax:Craftax-Classic-Symbolic-v1": (1345,),
    "jumanji:Game2048-v1": (4, 4, 18),
    "jumanji:Sudoku-very-easy-v0": (9, 9, 11),
    "navix:Navix-Empty-5x5-v0": (5, 5, 21),
    "navix:Navix-Dynamic-Obstacles-5x5-v0": (5, 5, 21),
    "pgx:2048": (4, 4, 31),
    "pgx:kuhn_poker": (7,),
    "pgx:minatar-breakout": (10, 10, 4),
    "playground:CartpoleBalance": (5,),
    "playground:CheetahRun": (17,),
    "playground:HumanoidWalk": (67,),
    "xland:MiniGrid-DoorKey-5x5": (7, 7, 25),
}
PACKAGES = {"xland": "xminigrid", "playground": "mujoco_playground"}


def import_suite(name):
    """Skips the test if the suite is not installed."""
    suite = name.partition(":")[0]
    pytest.importorskip(PACKAGES.get(suite, suite))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_environment_plays_and_is_truncated_at_its_limit(name):
    import_suite(name)
    env = make_environment(name, {"max_steps_in_episode": LIMIT})
    assert (env.name, env.observation.shape, env.max_steps) == (name, NAMES[name], LIMIT)
    if name.startswith(("brax", "playground")):
        assert make_environment(name).max_steps == 1000
        assert set(env.action_space.low) == {-1.0} and set(env.action_space.high) == {1.0}

    play = random_play(env, NUM_ENVS, NUM_STEPS)
    before, after, trajectory = play(jax.random.key(0))
    assert not difference(play(jax.random.key(0)), (before, after, trajectory))
    assert not any(getattr(leaf, "weak_type", False) for leaf in jax.tree.leaves((before, after, trajectory)))
    assert trajectory.reward.dtype == jnp.float32
    assert np.isfinite(trajectory.observation.astype(jnp.float32)).all() and np.isfinite(trajectory.reward).all()
    at_limit = trajectory.episode_length == LIMIT
    assert np.array_equal(trajectory.truncated, at_limit & ~trajectory.terminated)
    always_truncates = not name.startswith(("jumanji", "navix", "pgx:kuhn", "xland"))
    assert (trajectory.truncated if always_truncates else trajectory.ended).any()


def test_every_environment_of_brax_is_tested_or_known_to_fail():
    envs = pytest.importorskip("brax.envs")
    assert {*BRAX} | BROKEN_IN_BRAX == {*envs._envs}


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
def test_parameters_of_craftax_are_traced_and_it_truncates():
    pytest.importorskip("craftax")
    env = make_environment("craftax:Craftax-Classic-Symbolic-v1")
    assert env.max_steps == 10_000 and {"zombie_health", "spawn_cow_chance"} <= set(env.params)
    state, _ = env.reset(jax.random.key(0), env.params)
    state = state.replace(timestep=jnp.asarray(9_999, state.timestep.dtype))
    moved = env.step(jax.random.key(0), state, 0, env.params)
    assert moved.truncated and not moved.terminated


MISTAKES = {
    "brax:ants": "has no environment '.*': did you mean 'ant'",
    "craftax:Craftax-v1": "did you mean 'Craftax-Pixels-v1'|did you mean 'Craftax-Symbolic-v1'",
    "jumanji:Snake-v0": "did you mean 'Snake-v1'",
    "jumanji:Connector-v3": "rewards 10 agents separately",
    "jumanji:JobShop-v0": "an action mask for 10 choices at once",
    "navix:Navix-Empty-5x5": "did you mean 'Navix-Empty-5x5-v0'",
    "pgx:2084": "did you mean '2048'",
    "pgx:sparrow_mahjong": "a game of 3 players; use a game of one or two",
    "playground:CartPoleBalance": "did you mean 'CartpoleBalance'",
    "xland:MiniGrid-Empty5x5": "did you mean 'MiniGrid-Empty-5x5'",
}


@pytest.mark.parametrize(
    "name", [name if name[:3] in ("pgx", "cra") else pytest.param(name, marks=pytest.mark.slow) for name in MISTAKES]
)
def test_errors_name_the_nearest_environments(name):
    import_suite(name)
    with pytest.raises(ConfigError, match=MISTAKES[name]):
        make_environment(name)


@pytest.mark.parametrize("suite", ["brax", "craftax", "jumanji", "navix", "pgx", "playground", "xland"])
def test_a_suite_that_is_not_installed_is_named(suite, monkeypatch):
    for module in (suite, "craftax.craftax_env", "mujoco_playground", "xminigrid"):
        monkeypatch.setitem(sys.modules, module, None)
    package = "xminigrid" if suite == "xland" else suite
    with pytest.raises(ValueError, match=f"needs {suite}: pip install '{package}[<>=]"):
        make_environment(f"{suite}:any")

"""Other suites, if they are installed: the same interface, the same guarantees; and tiny fakes, which always are."""

import sys
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import difference, random_play

from grpo_jax.environments import Discrete, make_environment
from grpo_jax.environments.suites.grids import one_hot_layers
from grpo_jax.environments.suites.jumanji import Jumanji
from grpo_jax.environments.suites.pgx import Pgx, random_legal
from grpo_jax.errors import ConfigError

LIMIT, NUM_ENVS, NUM_STEPS = 6, 3, 14
NAMES = {
    "brax:ant": (27,),
    "brax:inverted_pendulum": (4,),
    "craftax:Craftax-Classic-Symbolic-v1": (1345,),
    "jumanji:Game2048-v1": (4, 4, 18),
    "jumanji:Sudoku-very-easy-v0": (9, 9, 11),
    "navix:Navix-Dynamic-Obstacles-5x5-v0": (5, 5, 21),
    "pgx:2048": (4, 4, 31),
    "pgx:kuhn_poker": (7,),
    "pgx:minatar-breakout": (10, 10, 4),
    "playground:CartpoleBalance": (5,),
    "playground:CheetahRun": (17,),
    "xland:MiniGrid-DoorKey-5x5": (7, 7, 25),
}
"""The shape of an observation of each."""
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
        assert make_environment(name).max_steps == 1000 and {*env.action_space.low} == {-1.0}

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
    "xland:XLand-MiniGrid-R1-9x9": "a world named XLand has no goal without a benchmark",
    "xland:MiniGrid-Empty-5x5/trivial-21k": "and others have one",
    "xland:XLand-MiniGrid-R1-9x9/trivial-22k": "did you mean 'trivial-21k'",
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


def test_a_suite_that_is_not_installed_is_named(monkeypatch):
    for suite in ("brax", "craftax", "gymnasium", "jumanji", "navix", "pgx", "playground", "xland"):
        for module in (suite, "craftax.craftax_env", *PACKAGES.values()):
            monkeypatch.setitem(sys.modules, module, None)
        name = "Craftax-Symbolic-v1" if suite == "craftax" else "any"
        package = "xminigrid" if suite == "xland" else suite
        with pytest.raises(ConfigError, match=f"needs {suite}: pip install '{package}[<>=]"):
            make_environment(f"{suite}:{name}")


# --- single suites ----------------------------------------------------------------------------------------------------


class Nim(NamedTuple):
    """A state of a game: who takes the last of the stones wins; a move takes one or two."""

    stones: jax.Array
    current_player: jax.Array
    observation: jax.Array
    legal_action_mask: jax.Array
    rewards: jax.Array
    terminated: jax.Array


class NimGame:
    num_players, num_actions = 2, 2

    def state(self, stones, player, rewards=(0.0, 0.0)):
        stones, player = jnp.int32(stones), jnp.int32(player)
        legal = (jnp.arange(1, 3) <= stones) | (stones <= 0)
        return Nim(stones, player, jnp.stack([stones, player]), legal, jnp.array(rewards), stones <= 0)

    def init(self, key):
        return self.state(5, jax.random.bernoulli(key))

    def step(self, state, action, key):
        stones, player = state.stones - 1 - action, state.current_player
        won = jnp.where(jnp.arange(2) == player, 1.0, -1.0) * (stones <= 0)
        return self.state(stones, 1 - player, won)


@pytest.fixture
def nim(monkeypatch):
    module = types.SimpleNamespace(available_envs=lambda: ["nim"], make=lambda name: NimGame())
    monkeypatch.setitem(sys.modules, "pgx", module)


def take_one(key, observation, action_mask):
    assert observation.shape == (2,) and action_mask.shape == (2,)
    return jnp.where(observation[1] == 1, 0, 1)  # one stone, if it sees the game as the opponent


def test_the_opponent_replies_and_the_learner_is_paid(nim):
    env = make_environment(Pgx("nim", against=take_one))
    reset, step = jax.jit(lambda key: env.reset(key, {})), jax.jit(lambda s, a: env.step(jax.random.key(0), s, a, {}))
    begins = set()
    for seed in range(6):
        state, observation = reset(jax.random.key(seed))
        assert observation[1] == 0, "it is the learning player's turn"
        begins.add(int(observation[0]))
    assert begins == {5, 4}, "either player begins"

    state = state.replace(inner=NimGame().state(5, 0), time=0)
    moved = step(state, 1)  # 5 - 2 - 1: one more move of two stones wins
    assert moved.observation.tolist() == [2, 0] and moved.reward == 0 and not moved.terminated
    won, lost = step(moved.state, 1), step(moved.state, 0)
    assert (won.reward, won.terminated) == (1, True)
    assert (lost.reward, lost.terminated) == (-1, True), "the opponent takes the last stone"


def test_an_opponent_without_a_policy_makes_random_legal_moves():
    legal = jnp.array([True, False, True, False])
    actions = jax.vmap(lambda key: random_legal(key, None, legal))(jax.random.split(jax.random.key(0), 200))
    assert np.abs(np.bincount(actions, minlength=4) - [100, 0, 100, 0]).max() < 30


def test_categories_become_one_hot_layers():
    layers = one_hot_layers(jnp.array([[1, 0], [2, 9]]), (3, 2))
    assert layers.tolist() == [[0, 1, 0, 1, 0], [0, 0, 1, 0, 0]] and layers.dtype == jnp.int8


@pytest.mark.slow
def test_the_step_key_decides_where_obstacles_of_navix_go():
    pytest.importorskip("navix")
    env = make_environment("navix:Navix-Dynamic-Obstacles-8x8-v0")
    state, _ = env.reset(jax.random.key(0), env.params)
    step = jax.jit(lambda key: env.step(key, state, 0, env.params).observation)
    grids = {np.asarray(step(jax.random.key(seed))).tobytes() for seed in range(8)}
    assert len(grids) > 1, "members of a group differ"


@pytest.mark.slow
def test_a_benchmark_of_xland_gives_each_episode_a_ruleset(tmp_path, monkeypatch):
    pytest.importorskip("xminigrid")
    from xminigrid import benchmarks
    from xminigrid.core import constants, goals, rules

    monkeypatch.setattr(benchmarks, "DATA_PATH", str(tmp_path))
    name = "xland:XLand-MiniGrid-R1-9x9/trivial-21k"
    with pytest.raises(ConfigError, match="'trivial-21k' has not been downloaded to .*load_benchmark"):
        make_environment(name)

    tiles = [constants.TILES_REGISTRY[constants.Tiles.BALL, color] for color in range(1, 3)]
    encoded = {
        "goals": jnp.stack([goals.AgentHoldGoal(tile).encode() for tile in tiles]),
        "rules": jnp.stack([rules.EmptyRule().encode()[None]] * 2),
        "init_tiles": jnp.stack([tile[None] for tile in tiles]),
        "num_rules": jnp.zeros(2, jnp.uint8),
    }
    benchmarks.save_bz2_pickle(encoded, str(tmp_path / benchmarks.NAME2HFFILENAME["trivial-21k"]))
    env = make_environment(name)
    states, _ = jax.vmap(lambda key: env.reset(key, env.params))(jax.random.split(jax.random.key(0), 16))
    assert len(np.unique(states.goal_encoding, axis=0)) == 2, "each reset draws a ruleset"

    # The agent faces the ball: picking it up is the goal.
    state = jax.tree.map(lambda leaf: leaf[0], states)
    y, x = np.argwhere(np.asarray(state.grid[..., 0]) == constants.Tiles.BALL)[0]
    below = state.agent.replace(position=jnp.array([y + 1, x]), direction=jnp.zeros_like(state.agent.direction))
    moved = env.step(jax.random.key(0), state.replace(agent=below), 3, env.params)
    assert moved.terminated and abs(moved.reward - (1 - 0.9 / env.max_steps)) < 1e-6
    last = env.step(jax.random.key(0), state.replace(step_num=state.step_num + env.max_steps - 1), 1, env.params)
    assert last.truncated and not last.terminated


@pytest.mark.slow
def test_masks_of_the_parts_of_an_action_become_one_mask():
    pytest.importorskip("jumanji")
    env = Jumanji("Cleaner-v0")
    assert env.action_space(None) == Discrete(4**3)
    _, state = env.reset_env(jax.random.key(0), None)
    parts = np.asarray(env.inner.reset(jax.random.key(0))[1].observation.action_mask)
    joint = np.asarray(env.action_mask(state, None))
    for action in range(64):
        assert joint[action] == all(parts[i, a] for i, a in enumerate(np.unravel_index(action, (4, 4, 4))))

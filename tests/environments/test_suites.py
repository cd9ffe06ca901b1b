"""gymnax, and other suites if they are installed: the same guarantees; and tiny fakes, which always are."""

import collections
import subprocess
import sys
import types
from unittest import mock

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from probes import difference, random_play

from grpo_jax.environments import Discrete, make_environment
from grpo_jax.environments.suites import NAMES, SUITES
from grpo_jax.environments.suites.grids import one_hot_layers
from grpo_jax.environments.suites.jumanji import Jumanji
from grpo_jax.environments.suites.pgx import Pgx, random_legal
from grpo_jax.environments.suites.physics import Playground, in_float32
from grpo_jax.errors import ConfigError

LIMIT, NUM_ENVS, NUM_STEPS = 6, 3, 14
PLAYED = {
    "brax:ant": (27,),
    "brax:inverted_pendulum": (4,),
    "craftax:Craftax-Classic-Symbolic-v1": (1345,),
    "gymnasium:CartPole-v1": (4,),
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
    suite, colon, _ = name.partition(":")
    pytest.importorskip(PACKAGES.get(suite, suite) if colon else "gymnax")


def some_slow(names, fast):
    """Those of suites that take long to import, or to compile, are slow."""
    return [name if name.partition(":")[0] in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


GYMNAX = [name for name in gymnax.registered_envs if name != "MNISTBandit-bsuite"]  # which downloads its images
FAST = "gymnasium", "Pendulum-v1", "Breakout-MinAtar", "UmbrellaChain-bsuite"


@pytest.mark.parametrize("name", some_slow([*GYMNAX, *PLAYED], FAST))
def test_an_environment_plays_and_is_truncated_at_its_limit_alone(name):
    import_suite(name)
    env = make_environment(name, {"max_steps_in_episode": LIMIT})
    assert (env.name, env.max_steps) == (name, LIMIT)
    if name in PLAYED:
        assert env.observation.shape == PLAYED[name]
    else:
        assert set(env.params) == set(vars(gymnax.make(name)[1])) - {"max_steps_in_episode"}, "every number is traced"
    if name.startswith(("brax", "playground")):
        assert make_environment(name).max_steps == 1000 and {*env.action_space.low} == {-1.0}

    play = random_play(env, NUM_ENVS, NUM_STEPS)
    played = _, _, trajectory = play(jax.random.key(1))
    assert not difference(play(jax.random.key(1)), played), "the same key, the same episodes"
    assert not any(getattr(leaf, "weak_type", False) for leaf in jax.tree.leaves(played))
    seen, reward, at_limit = trajectory.observation, trajectory.reward, trajectory.episode_length == LIMIT
    assert (seen.shape, seen.dtype) == ((NUM_STEPS, NUM_ENVS, *env.observation.shape), env.observation.dtype)
    # The rewards of UmbrellaChain and BernoulliBandit are integers in gymnax.
    assert (reward.shape, reward.dtype) == ((NUM_STEPS, NUM_ENVS), jnp.float32)
    assert np.isfinite(seen.astype(jnp.float32)).all() and np.isfinite(reward).all()
    assert np.array_equal(trajectory.truncated, at_limit & ~trajectory.terminated), "both at once is a termination"
    assert (trajectory.episode_length <= LIMIT).all() and trajectory.ended.any()


def test_moves_of_2048_that_change_nothing_are_illegal():
    pytest.importorskip("pgx")
    env = make_environment("pgx:2048")
    state, _ = env.reset(jax.random.key(0), env.params)
    mask, step = jax.jit(env.action_mask), jax.jit(env.step)
    for t in range(20):
        assert (legal := mask(state, env.params)).any() and legal.shape == (env.action_space.num_actions,) == (4,)
        moved = step(jax.random.key(t), state, jnp.argmax(legal), env.params)
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
    "jumanji:Connector-v3": "rewards 10 agents separately",
    "jumanji:JobShop-v0": "an action mask for 10 choices at once",
    "pgx:2084": "did you mean '2048'",
    "pgx:sparrow_mahjong": "a game of 3 players; use a game of one or two",
    "xland:XLand-MiniGrid-R1-9x9": "has no goal of its own; write 'xland:MiniGrid",
    "xland:MiniGrid-Empty5x5": "did you mean 'MiniGrid-Empty-5x5'",
}


@pytest.mark.parametrize("name", some_slow(MISTAKES, ["craftax", "pgx"]))
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


Nim = collections.namedtuple("Nim", "stones current_player observation legal_action_mask rewards terminated")


class NimGame:
    """Who takes the last of the stones wins; a move takes one or two."""

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


def take_one(key, observation, action_mask):
    assert observation.shape == (2,) and action_mask.shape == (2,)
    return jnp.where(observation[1] == 1, 0, 1)  # one stone, if it sees the game as the opponent


def test_the_opponent_replies_and_the_learner_is_paid(monkeypatch):
    monkeypatch.setitem(sys.modules, "pgx", types.SimpleNamespace(make=lambda name: NimGame()))
    env = make_environment(Pgx("nim", against=take_one))
    states, observed = jax.jit(jax.vmap(lambda key: env.reset(key, {})))(jax.random.split(jax.random.key(0), 6))
    observed = np.asarray(observed)
    assert not observed[:, 1].any(), "it is the learning player's turn"
    assert set(observed[:, 0].tolist()) == {5, 4}, "either player begins"

    step = jax.jit(lambda state, action: env.step(jax.random.key(0), state, action, {}))
    state = jax.jit(
        lambda states: jax.tree.map(lambda leaf: leaf[0], states).replace(inner=NimGame().state(5, 0), time=0)
    )(states)
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
def test_masks_of_the_parts_of_an_action_become_one_mask():
    pytest.importorskip("jumanji")
    env = Jumanji("Cleaner-v0")
    assert env.action_space(None) == Discrete(4**3)
    _, state = env.reset_env(jax.random.key(0), None)
    parts = np.asarray(env.inner.reset(jax.random.key(0))[1].observation.action_mask)
    joint = np.asarray(env.action_mask(state, None))
    for action in range(64):
        assert joint[action] == all(parts[i, a] for i, a in enumerate(np.unravel_index(action, (4, 4, 4))))


# --- rigid bodies -----------------------------------------------------------------------------------------------------


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


@struct.dataclass
class Counted:
    obs: dict
    reward: float
    done: float
    count: int


class Counter:
    """A task of Playground that counts its steps, in an observation of two arrays."""

    action_size = 2

    def reset(self, key):
        return Counted({"state": jnp.zeros(1), "privileged_state": jnp.zeros(2)}, 0.0, 0.0, 0)

    def step(self, state, action):
        count = state.count + 1
        obs = {"state": jnp.full(1, count, float), "privileged_state": jnp.full(2, count, float)}
        return Counted(obs, count * jnp.sum(action), jnp.float32(count >= 6), count)


def test_actions_are_repeated_and_observations_may_be_dicts(monkeypatch):
    settings = type("Settings", (dict,), {"episode_length": 7, "action_repeat": 2})()
    registry = mock.Mock(**{"get_default_config.return_value": settings, "load.return_value": Counter()})
    monkeypatch.setitem(sys.modules, "mujoco_playground", types.SimpleNamespace(registry=registry))
    env = make_environment(Playground("CartpoleBalance"))
    assert env.max_steps == 4 and env.observation["privileged_state"].shape == (2,)
    (state, _), moves = env.reset(jax.random.key(0), env.params), []
    for _ in range(3):
        moves.append(env.step(jax.random.key(0), state, jnp.array([0.25, 0.25]), env.params))
        state = moves[-1].state
    assert [each.reward for each in moves] == [0.5 * (1 + 2), 0.5 * (3 + 4), 0.5 * (5 + 6)]
    assert [each.terminated for each in moves] == [False, False, True]
    assert moves[-1].observation["state"] == 6 and state.time == 3


def test_what_cannot_be_downloaded_is_an_error(monkeypatch):
    monkeypatch.setitem(NAMES, "playground", lambda: ["Go1Getup"])
    for error in (OSError(28, "a full disk"), subprocess.CalledProcessError(128, ["git", "clone"])):
        monkeypatch.setitem(SUITES, "playground", mock.Mock(side_effect=error))
        with pytest.raises(ConfigError, match="needs data that could not be downloaded: .*(disk|clone)"):
            make_environment("playground:Go1Getup")

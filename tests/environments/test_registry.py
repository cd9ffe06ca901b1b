"""Environments by name, by path and as objects, and the errors for those that cannot be made."""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import spaces
from probes import Probe

from grpo_jax.environments import Discrete, make_environment
from grpo_jax.environments.tokens import ACCURACY, make_task
from grpo_jax.errors import ConfigError


class Place(NamedTuple):
    room: jax.Array
    at: tuple


class Rooms(Probe):
    """Observes a room by its number, a door by its number, and a place."""

    def get_obs(self, state, params=None, key=None):
        return {"door": state.time, "place": Place(state.time + 1, (state.mark, jnp.zeros(2, bool)))}

    def observation_space(self, params):
        return spaces.Dict({"door": spaces.Discrete(5), "place": {"room": spaces.Discrete(7)}})


class PlainRooms(Rooms):
    def observation_space(self, params):
        return {"door": Discrete(5), "place": {"room": Discrete(7)}}


class Comparing(Probe):
    """Its constructor compares arrays, as that of Jumanji's Snake."""

    def __init__(self):
        assert jnp.arange(2).sum() > 0


def test_an_environment_can_be_made_while_a_function_is_traced():
    """The second call gets the environment that the first has made, whose parameters are no tracers."""

    def torque(x):
        params = {"available_torque": (-2.0, 0.0, 2.0)}
        x *= make_environment(f"{__name__}:Comparing").max_steps / make_environment(Probe()).max_steps
        return x * make_environment("Acrobot-v1", params).params["available_torque"]

    assert [jax.jit(torque)(x).tolist() for x in (1.0, jnp.ones(3))] == [[-2.0, 0.0, 2.0]] * 2


a_probe = Probe()


def make_probe():
    return Probe()


def test_an_environment_of_ones_own_is_named_by_its_path():
    for path in ("probes:Probe", f"{__name__}:a_probe", f"{__name__}:make_probe"):
        env = make_environment(path, {"lifetime": 2})
        assert (env.name, env.action_space, env.params["lifetime"]) == (path, Discrete(2), 2)


class Lost(Rooms):
    def observation_space(self, params):
        return spaces.Dict({"door": spaces.Discrete(5)})


ONE_PROMPT = make_task("sort-2")._replace(draw=lambda key: jnp.zeros(2, int))
SAME_NAMES = make_task("sort-2")._replace(rewards=(ACCURACY, ACCURACY))
REFUSED = {
    ("CartPole-v2",): "unknown environment 'CartPole-v2': did you mean 'CartPole-v1'",
    ("???",): "known: .*CartPole-v1",
    (3,): "does not have gymnax's interface: it lacks default_params",
    (Lost(),): r"observes an integer of unknown range\['place'\].room",
    ("no_such_module:Name",): "cannot import 'no_such_module'.*No module named",
    ("probes:Prob",): "'probes' has no 'Prob': did you mean 'Probe'",
    ("small:begin",): "cannot call .begin. without arguments.*config",
    ("MNISTBandit-bsuite",): "needs data that could not be downloaded",
    ("CartPole-v1", "max_steps", 20): "no parameter 'max_steps': did you mean 'max_steps_in_episode'",
    ("CartPole-v1", "max_steps_in_episode", 0): "leaves no step",
    ("Acrobot-v1", "available_torque", (1.0, 2.0)): "available_torque has shape .3,., but was given",
    ("Acrobot-v1", "available_torque", (1.0, 2.0, np.inf)): "available_torque=.* must have finite numbers",
    ("tokens:sortt-5",): "did you mean 'sort'",
    ("tokens:sort-five",): "tokens:sort-5",
    ("tokens:addition-9",): "use fewer digits",
    ("tokens:calculator-4",): "up to 3 digits",
    ("tokens:sort-5", "heldout", 1): "did you mean 'held_out'",
    (ONE_PROMPT,): "always draws the same prompt",
    (SAME_NAMES,): "differ in their names",
}


def test_errors_name_the_nearest_correct_value():
    for (environment, *override), message in REFUSED.items():
        with pytest.raises(ConfigError, match=message):
            make_environment(environment, {override[0]: override[1]} if override else None)


@pytest.mark.parametrize("kind", [Rooms, PlainRooms])
def test_observations_of_several_arrays_keep_their_structure(kind):
    env = make_environment(kind())
    state, first = env.reset(jax.random.key(0), env.params)
    for observation in (first, env.step(jax.random.key(0), state, 0, env.params).observation):
        assert jax.eval_shape(lambda: observation) == env.observation  # noqa: B023
    assert np.array_equal(first["door"], np.eye(5)[0]) and np.array_equal(first["place"].room, np.eye(7)[1])
    assert first["place"].at[0] == state.mark and first["place"].at[1].dtype == bool


ONE_MODULE = """
import sys, grpo_jax

assert "jax" not in sys.modules
from grpo_jax.objectives import grpo_loss

assert grpo_jax.grpo_loss is grpo_loss
modules = {name.split(".")[1] for name in sys.modules if name.startswith("grpo_jax.")}
assert modules == {"errors", "hyperparams", "objectives", "precision", "types"}, modules
from grpo_jax import *

heavy = {"orbax", "gymnax", "matplotlib", "tensorboardX", "tyro", "wandb"} & set(sys.modules)
assert not heavy, heavy
from grpo_jax.environments import make_environment

one = make_environment("CartPole-v1")
assert make_environment("CartPole-v1", {}) is one and make_environment("CartPole-v1", {"gravity": 1}) is not one
heavy = {"matplotlib", "seaborn", "pandas", "scipy.stats"}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()

import gymnax  # all of it has been imported, with placeholders for what draws
from gymnax.environments.misc import pong

gymnax.register("Mine-v0", gymnax.environments.CartPole)
assert make_environment("Mine-v0").max_steps == one.max_steps
assert pong.colors.ListedColormap(["red"]).N == 1 and "matplotlib.colors" in sys.modules
"""


def test_importing_is_light_and_draws_when_asked():
    """A name is imported at its first use: a program that takes only the formulas waits for nothing else."""
    subprocess.run([sys.executable, "-c", ONE_MODULE], check=True, cwd=Path(__file__).parents[2])


# --- the environments of gymnax ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, dtype", [("CartPole-v1", jnp.float32), ("Breakout-MinAtar", jnp.int8)])
def test_steps_and_resets_are_gymnax_s_bitwise(name, dtype):
    """Also where bytes are observed."""
    env, (original, params) = make_environment(name), gymnax.make(name)
    key, ends = jax.random.key(3), 0
    (state, seen), (theirs, their_state) = jax.jit(env.reset)(key, env.params), jax.jit(original.reset_env)(key, params)
    step, their_step = jax.jit(env.step), jax.jit(original.step_env)
    for t in range(60):
        np.testing.assert_array_equal(seen, theirs)
        key, action = jax.random.key(t), t % 3 // 2  # chosen to drop the pole
        state, seen, reward, terminated, *_ = step(key, state, action, env.params)
        theirs, their_state, *expected, _ = their_step(key, their_state, action, params)
        assert [reward, terminated] == expected
        ends += terminated
    assert seen.dtype == dtype and ends
    jax.tree.map(np.testing.assert_array_equal, *map(jax.tree.leaves, (state, their_state)))


def test_overrides_are_cast_and_reach_the_physics():
    """The command line parses every number as a float; the limit stays an integer."""
    light, heavy = (make_environment("CartPole-v1", {"gravity": g, "max_steps_in_episode": 3.0}) for g in (1, 20.0))
    assert light.max_steps == 3 and isinstance(light.max_steps, int)
    state, _ = light.reset(jax.random.key(0), light.params)
    speeds = [env.step(None, state, 0, env.params).state.theta_dot for env in (light, heavy)]
    assert speeds[0] != speeds[1]

"""Pictures of environments."""

import jax
import numpy as np
import pytest
from gymnax.environments.misc import frozen_lake
from probes import Probe

from grpo_jax.environments import make_environment
from grpo_jax.errors import ConfigError
from grpo_jax.rendering import grids, make_renderer
from grpo_jax.rendering.renderer import DRAWINGS

IMAGES = ("Catch-bsuite",)
# Environments that always start in the same place, and a field of their states.
FIXED = {"FrozenLake-misc": "position", "FourRooms-misc": "pos"}
SUITES = ("brax:inverted_pendulum", "craftax:Craftax-Classic-Symbolic-v1", "pgx:2048", "pgx:minatar-breakout")


def start_states(name):
    """Start states of different keys and their observations, each leaf `[8, ...]`."""
    env = make_environment(name)
    return jax.jit(jax.vmap(lambda key: env.reset(key, env.params)))(jax.random.split(jax.random.key(0), 8))


@pytest.mark.parametrize("name", [*DRAWINGS, *IMAGES])
def test_a_picture_changes_with_the_state(name):
    states, observations = jax.tree.map(np.asarray, start_states(name))
    if name in FIXED:
        place = getattr(states, FIXED[name])
        states = states.replace(**{FIXED[name]: (place.T + np.arange(len(place))).T})
    frames = make_renderer(name).draw(states, observations)
    assert frames.dtype == np.uint8 and frames.shape[0] == 8 and frames.shape[-1] == 3
    assert min(frames.shape[1:3]) >= 100
    assert (frames != frames[0]).any()


def test_the_frozen_lake_shows_its_holes_and_its_goal():
    states, observations = jax.tree.map(np.asarray, start_states("FrozenLake-misc"))
    frame = make_renderer("FrozenLake-misc").draw(states, observations)[0]
    kinds = np.asarray(frozen_lake.FrozenLake().desc)
    side = len(frame) // len(kinds)
    cells = frame[side // 2 :: side, side // 2 :: side]
    np.testing.assert_array_equal((cells == grids.HOLE).all(axis=-1), kinds == frozen_lake.HOLE)
    np.testing.assert_array_equal((cells == grids.GOAL).all(axis=-1), kinds == frozen_lake.GOAL)


@pytest.mark.slow
@pytest.mark.parametrize("name", SUITES)
def test_a_suite_has_pictures(name):
    pytest.importorskip(name.partition(":")[0])
    states, observations = start_states(name)
    frames = make_renderer(name).draw(states, np.asarray(observations))
    assert frames.dtype == np.uint8 and frames.shape[0] == 8 and frames.shape[-1] == 3
    assert (frames != frames[0]).any()


def test_a_cell_has_the_color_of_its_last_channel():
    observations = np.zeros((1, 4, 4, 2), np.int8)
    observations[0, 0, 0] = 1, 0
    observations[0, 1, 1] = 1, 1
    image = grids.draw_observations(observations)[0, ::60, ::60]
    assert tuple(image[0, 0]) == grids.CHANNELS[0]
    assert tuple(image[1, 1]) == grids.CHANNELS[1]
    assert tuple(image[2, 2]) == grids.EMPTY


def test_pixels_keep_their_colors():
    pixels = np.linspace(0, 1, 2 * 32 * 32 * 3).reshape(2, 32, 32, 3)
    assert np.array_equal(grids.draw_observations(pixels)[:, ::7, ::7], np.rint(255 * pixels).astype(np.uint8))


class Drawn(Probe):
    def render(self, state, params):
        return np.full((8, 8, 3), params.bonus, np.uint8)


def test_an_environments_own_picture_comes_first():
    renderer = make_renderer(Drawn(), {"bonus": 7.0})
    assert (renderer.draw({"time": np.arange(3)}, np.zeros((3, 1))) == np.full((3, 8, 8, 3), 7)).all()


@pytest.mark.parametrize("environment", ["DiscountingChain-bsuite", Probe()], ids=["name", "object"])
def test_an_environment_without_a_picture_is_refused(environment):
    with pytest.raises(ConfigError, match=r"there is no drawing of .* give the environment a method render"):
        make_renderer(environment)


def test_a_token_task_is_refused():
    with pytest.raises(ConfigError, match="a token task has no picture"):
        make_renderer("tokens:sort-5")

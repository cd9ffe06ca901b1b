"""Pictures of environments."""

import jax
import numpy as np
import pytest
from probes import Probe

from grpo_jax.environments import make_environment
from grpo_jax.errors import ConfigError
from grpo_jax.rendering import make_renderer
from grpo_jax.rendering.drawings import CHANNELS, DRAWINGS, EMPTY, draw_observations

BY_GYMNAX = ("MetaMaze-misc", "PointRobot-misc")
SUITES = ("brax:inverted_pendulum", "craftax:Craftax-Classic-Symbolic-v1", "pgx:2048", "pgx:minatar-breakout")


@pytest.mark.parametrize(
    "name",
    [*DRAWINGS, *BY_GYMNAX, "Catch-bsuite", "Reacher-misc"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in SUITES],
)
def test_a_picture_changes_with_the_state(name):
    suite, colon, _ = name.partition(":")
    if colon:
        pytest.importorskip(suite)
    env = make_environment(name)
    states, observations = jax.jit(jax.vmap(lambda key: env.reset(key, env.params)))(
        jax.random.split(jax.random.key(0), 8)
    )
    if not colon:
        states = jax.tree.map(np.asarray, states)
    frames = make_renderer(name).draw(states, np.asarray(observations))
    assert frames.dtype == np.uint8 and frames.shape[0] == 8 and frames.shape[-1] == 3
    assert min(frames.shape[1:3]) >= 100 and (frames != frames[0]).any()


def test_observations_are_cells_of_channels_pixels_or_a_heat_map():
    cells = np.zeros((1, 4, 4, 2), np.int8)
    cells[0, 0, 0], cells[0, 1, 1] = (1, 0), (1, 1)
    image = draw_observations(cells)[0, ::60, ::60]
    assert [tuple(image[i, i]) for i in range(3)] == [*CHANNELS[:2], EMPTY]
    pixels = np.linspace(0, 1, 2 * 32 * 32 * 3).reshape(2, 32, 32, 3)
    assert np.array_equal(draw_observations(pixels)[:, ::7, ::7], np.rint(255 * pixels).astype(np.uint8))
    colors = draw_observations(np.array([[0.0, 1e9, -1.0]]))[0, 0, ::80]
    assert colors.tolist() == [[255, 255, 255], [255, 0, 0], [127, 127, 255]]


class Drawn(Probe):
    def render(self, state, params):
        return np.full((8, 8, 3), params.bonus, np.uint8)


def test_an_environments_own_picture_comes_first():
    renderer = make_renderer(Drawn(), {"bonus": 7.0})
    assert (renderer.draw({"time": np.arange(3)}, np.zeros((3, 1))) == np.full((3, 8, 8, 3), 7)).all()


def test_what_has_no_picture_is_refused():
    for environment, message in (
        ("tokens:sort-5", "a token task has no picture"),
        ("probes:Parts", "it observes no array; give the environment a method render"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_renderer(environment)

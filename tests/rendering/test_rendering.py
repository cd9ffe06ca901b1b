"""Pictures of environments, and animations of them as files."""

import jax
import numpy as np
import pytest
from PIL import Image
from probes import Probe

from grpo_jax.environments import make_environment
from grpo_jax.errors import ConfigError
from grpo_jax.rendering import make_renderer, write_animation
from grpo_jax.rendering.drawings import CAPTION_HEIGHT, DRAWINGS, EMPTY, captioned, draw_observation

SUITES = ("brax:inverted_pendulum", "craftax:Craftax-Classic-Symbolic-v1", "pgx:2048", "pgx:minatar-breakout")


@pytest.mark.parametrize(
    "name",
    [*DRAWINGS, "Catch-bsuite", "Reacher-misc"] + [pytest.param(name, marks=pytest.mark.slow) for name in SUITES],
)
def test_a_picture_changes_with_the_state(name):
    suite, colon, _ = name.partition(":")
    if colon:
        pytest.importorskip(suite)
    env = make_environment(name)
    keys = jax.random.split(jax.random.key(0), (8, 1))
    states, observations = jax.jit(jax.vmap(jax.vmap(lambda key: env.reset(key, env.params))))(keys)
    if not colon:
        states = jax.tree.map(np.asarray, states)
    frames = make_renderer(name).frames(states, np.asarray(observations))
    assert frames.dtype == np.uint8 and frames.shape[:2] == (8, 1) and frames.shape[-1] == 3
    assert min(frames.shape[2:4]) >= 100 and (frames != frames[0]).any()


def test_observations_are_cells_of_channels_pixels_or_a_heat_map():
    cells = np.zeros((4, 4, 2), np.int8)
    cells[0, 0], cells[1, 1] = (1, 0), (1, 1)
    first, last, empty = (tuple(draw_observation(cells)[::60, ::60][i, i].tolist()) for i in range(3))
    assert empty == EMPTY and len({first, last, empty}) == 3
    pixels = np.linspace(0, 1, 32 * 32 * 3).reshape(32, 32, 3)
    assert np.array_equal(draw_observation(pixels)[::7, ::7], np.rint(255 * pixels).astype(np.uint8))
    colors = draw_observation(np.array([0.0, 1e9, -1.0]))[0, ::80].astype(int)
    assert np.abs(colors - [[255, 255, 255], [255, 0, 0], [128, 128, 255]]).max() <= 2


class Drawn(Probe):
    def render(self, state, params):
        return np.full((8, 8, 3), params.bonus, np.uint8)


def test_an_environments_own_picture_comes_first():
    renderer = make_renderer(Drawn(), {"bonus": 7.0})
    assert (renderer.frames({"time": np.zeros((3, 2))}, np.zeros((3, 2, 1))) == np.full((3, 2, 8, 8, 3), 7)).all()


def test_what_has_no_picture_is_refused():
    for environment, message in (
        ("tokens:sort-5", "a token task has no picture"),
        ("probes:Parts", "it observes no single array; give the environment a method render"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_renderer(environment)


# --- animations ------------------------------------------------------------------------------------------------------


def frames(num_frames, num_pictures=1):
    """A white square that moves over a colored ground: `[N, B, 24, 32, 3]`."""
    made = np.full((num_frames, num_pictures, 24, 32, 3), (40, 90, 160), np.uint8)
    for i in range(num_frames):
        made[i, :, 4:8, i : i + 4] = 255
    return made


def test_a_gif_has_every_frame_at_its_time_with_pictures_side_by_side(tmp_path):
    path, made = tmp_path / "folder" / "a.gif", frames(12, 2)
    made[11, 1, :12] = (250, 20, 20)  # a new color gets a place
    write_animation([made[:5], made[5:]], path, fps=25)
    with Image.open(path) as gif:
        assert gif.n_frames == 12 and gif.size == (2 * 32, 24)
        for i in range(12):
            gif.seek(i)
            assert gif.info["duration"] == (1040 if i == 11 else 40)
            assert np.array_equal(np.asarray(gif.convert("RGB")), np.concatenate(made[i], axis=1))


def test_a_caption_stands_above_a_picture():
    (frame,) = frames(1)[0]
    made = captioned(frame, "a")
    assert (made[:CAPTION_HEIGHT] < 128).any() and np.array_equal(made[CAPTION_HEIGHT:], frame)


def test_a_file_that_cannot_be_finished_is_not_there(tmp_path):
    path = tmp_path / "a.gif"
    path.write_bytes(b"earlier")

    def broken():
        yield frames(3)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_animation(broken(), path, fps=10)
    assert [each.name for each in tmp_path.iterdir()] == [path.name] and path.read_bytes() == b"earlier"

"""Animations as files."""

import numpy as np
import pytest
from PIL import Image

from grpo_jax.errors import ConfigError
from grpo_jax.rendering.animation import CAPTION_HEIGHT, captioned, side_by_side, write_animation


def frames(num_frames, num_pictures=1):
    """A white square that moves over a colored ground: `[N, B, 24, 32, 3]`."""
    made = np.full((num_frames, num_pictures, 24, 32, 3), (40, 90, 160), np.uint8)
    for i in range(num_frames):
        made[i, :, 4:8, i : i + 4] = 255
    return made


def test_a_gif_has_every_frame_at_its_time(tmp_path):
    path = tmp_path / "folder" / "a.gif"
    made = frames(12)
    write_animation([made[:5], made[5:]], path, fps=25)
    with Image.open(path) as gif:
        assert gif.n_frames == 12 and gif.size == (32, 24)
        for i in range(12):
            gif.seek(i)
            assert gif.info["duration"] == (1040 if i == 11 else 40)
            assert np.array_equal(np.asarray(gif.convert("RGB")), made[i, 0])


def test_new_colors_get_a_place(tmp_path):
    first, later = np.zeros((2, 1, 8, 8, 3), np.uint8), np.zeros((1, 1, 8, 8, 3), np.uint8)
    later[..., :4, :] = (250, 20, 20)
    write_animation([first, later], tmp_path / "a.gif", fps=10)
    with Image.open(tmp_path / "a.gif") as gif:
        gif.seek(gif.n_frames - 1)
        assert np.array_equal(np.asarray(gif.convert("RGB")), later[0, 0])


def test_a_sheet_has_frames_at_equal_distances(tmp_path):
    write_animation([frames(28)], tmp_path / "a.png", fps=10)
    with Image.open(tmp_path / "a.png") as sheet:
        assert sheet.size == (4 * 32, 4 * 24)  # 14 frames


def test_pictures_stand_side_by_side_below_their_captions():
    made = captioned(frames(2, 3), [["a", "b", "c"], ["d", "e", "f"]])
    assert made.shape == (2, 3, 24 + CAPTION_HEIGHT, 32, 3)
    assert (made[:, :, :CAPTION_HEIGHT] < 128).any(axis=(2, 3, 4)).all()
    tiled = side_by_side(made)
    height = 24 + CAPTION_HEIGHT
    assert tiled.shape == (2, 2 * height, 2 * 32, 3)
    assert np.array_equal(tiled[:, height:, :32], made[:, 2])
    assert (tiled[:, height:, 32:] == 255).all()


@pytest.mark.parametrize("suffix", [".gif", ".png"])
def test_a_file_that_cannot_be_finished_is_not_there(suffix, tmp_path):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"earlier")

    def broken():
        yield frames(3)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_animation(broken(), path, fps=10)
    assert [each.name for each in tmp_path.iterdir()] == [path.name] and path.read_bytes() == b"earlier"


def test_formats_are_checked(tmp_path):
    with pytest.raises(ConfigError, match="is not a name for an animation; use one that ends in .gif or .png"):
        write_animation([], tmp_path / "a.xyz", fps=10)

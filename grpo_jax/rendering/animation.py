"""Pictures that move, with captions, as files."""

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from grpo_jax.errors import ConfigError

CAPTION_HEIGHT = 20
"""Pixels above a picture for its caption."""

SHEET_FRAMES = 20
"""The most frames in a .png."""


def check_animation_path(path: Path) -> None:
    """Raises ConfigError if the file's format is unknown."""
    if path.suffix.lower() not in _WRITERS:
        raise ConfigError(f"{path} is not a name for an animation; use one that ends in {' or '.join(_WRITERS)}")


def write_animation(frames: Iterable[np.ndarray], path: Path, fps: float) -> None:
    """Writes frames while they are made, so that a long episode need not fit in memory.

    Args:
      frames: chunks `[N, B, H, W, 3]` uint8 of `N` frames, each of `B` pictures side by side.
      path: file to write: .gif, or .png for a sheet of at most 20 frames, which are equally spaced.
      fps: frames per second. A GIF has at most 50, and its frames last a multiple of 10 ms.

    Raises:
      ConfigError: for another format.
      OSError: the disk is full. A file of this name then stays as it was.
    """
    check_animation_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.stem}.unfinished{path.suffix}")
    try:
        _WRITERS[path.suffix.lower()](itertools.chain.from_iterable(map(side_by_side, frames)), unfinished, fps)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def side_by_side(frames: np.ndarray) -> np.ndarray:
    """`[N, B, H, W, 3]` as `[N, rows * H, columns * W, 3]`: pictures in about as many rows as columns, on white."""
    num_frames, num_pictures, height, width, _ = frames.shape
    columns = math.ceil(math.sqrt(num_pictures))
    rows = math.ceil(num_pictures / columns)
    padded = np.pad(frames, [(0, 0), (0, rows * columns - num_pictures), *3 * [(0, 0)]], constant_values=255)
    padded = padded.reshape(num_frames, rows, columns, height, width, 3).swapaxes(2, 3)
    return padded.reshape(num_frames, rows * height, columns * width, 3)


def captioned(frames: np.ndarray, captions: Sequence[Sequence[str]]) -> np.ndarray:
    """The pictures `[N, B, H, W, 3]` with a line of text above each: `[N, B, H + CAPTION_HEIGHT, W, 3]`."""
    width = frames.shape[-2]
    lines = np.stack([np.stack([_line(caption, width) for caption in row]) for row in captions])
    return np.concatenate([lines, frames], axis=2)


@functools.lru_cache(maxsize=1024)
def _line(text: str, width: int) -> np.ndarray:
    image = Image.new("RGB", (width, CAPTION_HEIGHT), "#ffffff")
    font = ImageFont.load_default(12)
    ImageDraw.Draw(image).text((6, CAPTION_HEIGHT / 2), text, fill="#2f3640", font=font, anchor="lm")
    return np.asarray(image)


def _write_gif(frames: Iterable[np.ndarray], path: Path, fps: float) -> None:
    duration = max(20, 10 * round(100 / fps))  # browsers slow down a GIF with shorter frames

    def images():
        for frame, following in itertools.pairwise(itertools.chain(frames, [None])):
            # A GIF has at most 256 colors. One is left for pixels that do not change.
            image = Image.fromarray(frame).quantize(255, dither=Image.Dither.NONE)
            image.info["duration"] = duration if following is not None else duration + 1000
            yield image

    made = images()
    next(made).save(path, save_all=True, append_images=made, loop=0)


def _write_sheet(frames: Iterable[np.ndarray], path: Path, fps: float) -> None:
    kept, stride = [], 1
    for i, frame in enumerate(frames):
        if i % stride == 0:
            kept.append(frame)
        if len(kept) > SHEET_FRAMES:
            kept, stride = kept[::2], 2 * stride
    Image.fromarray(side_by_side(np.stack(kept)[None])[0]).save(path)


_WRITERS = {".gif": _write_gif, ".png": _write_sheet}

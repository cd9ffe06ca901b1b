"""Pictures that move, with captions, as files."""

import contextlib
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from grpo_jax.errors import ConfigError
from grpo_jax.importing import pip_install

CAPTION_HEIGHT = 20
"""Pixels above a picture for its caption."""

COLOR_ERROR = 24
"""How far a color of a GIF may be from the frame's, in a channel, before a new palette is chosen."""

SHEET_FRAMES = 20
"""The most frames in a .png."""


def check_animation_path(path: Path) -> None:
    """Raises ConfigError if the file's format is unknown, or a package for it is missing."""
    suffix = path.suffix.lower()
    if suffix not in _WRITERS:
        raise ConfigError(f"{path} is not a name for an animation; use one that ends in {', '.join(_WRITERS)}")
    if suffix == ".mp4":
        try:
            import imageio_ffmpeg

            imageio_ffmpeg.get_ffmpeg_exe()
        except (ImportError, RuntimeError) as error:
            raise ConfigError(
                f"writing {path} needs imageio-ffmpeg: {pip_install('render')}; or use {path.with_suffix('.gif')}"
            ) from error


def write_animation(frames: Iterable[np.ndarray], path: Path, fps: float) -> None:
    """Writes frames while they are made, so that a long episode need not fit in memory.

    Args:
      frames: chunks `[N, B, H, W, 3]` uint8 of `N` frames, each of `B` pictures side by side.
      path: file to write: .gif; .mp4; or .png for a sheet of at most 20 frames, which are equally spaced.
      fps: frames per second. A GIF has at most 50, and its frames last a multiple of 10 ms.

    Raises:
      ConfigError: for another format, or if a package for it is missing.
      OSError: the disk is full. A file of this name then stays as it was.
    """
    check_animation_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.stem}.unfinished{path.suffix}")
    try:
        _WRITERS[path.suffix.lower()](map(side_by_side, frames), unfinished, fps)
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
    draw = ImageDraw.Draw(image)
    draw.text((6, CAPTION_HEIGHT / 2), text, fill="#2f3640", font=ImageFont.load_default(12), anchor="lm")
    return np.asarray(image)


def _write_gif(chunks: Iterable[np.ndarray], path: Path, fps: float) -> None:
    duration = max(20, 10 * round(100 / fps))  # browsers slow down a GIF with shorter frames
    images = _with_durations(_few_colors(chunks), duration)
    next(images).save(path, save_all=True, append_images=images, loop=0, optimize=True)


def _with_durations(images: Iterator[Image.Image], duration: int) -> Iterator[Image.Image]:
    """The images with their duration in milliseconds; the last one stays for a second more."""
    for image, next_image in itertools.pairwise(itertools.chain(images, [None])):
        image.info["duration"] = duration + 1000 * (next_image is None)
        yield image


def _few_colors(chunks: Iterable[np.ndarray]) -> Iterator[Image.Image]:
    """The frames with few colors, which later frames share as long as these fit: a GIF has a table in each frame."""
    palette = None
    for chunk in chunks:
        if palette is None or not _fits(chunk, palette):
            tall = Image.fromarray(chunk.reshape(-1, *chunk.shape[2:]))
            # A GIF has at most 256 colors. One is left for pixels that do not change.
            palette = tall.quantize(255, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        for frame in chunk:
            yield Image.fromarray(frame).quantize(palette=palette, dither=Image.Dither.NONE)


def _fits(chunk: np.ndarray, palette: Image.Image) -> bool:
    """Whether every pixel of the frames nearly keeps its color with this palette."""
    for frame in chunk:
        drawn = np.asarray(Image.fromarray(frame).quantize(palette=palette, dither=Image.Dither.NONE).convert("RGB"))
        if np.abs(drawn.astype(np.int16) - frame).max() > COLOR_ERROR:
            return False
    return True


def _write_mp4(chunks: Iterable[np.ndarray], path: Path, fps: float) -> None:
    import imageio_ffmpeg

    writer, num_frames = None, 0
    for chunk in chunks:
        # The format has half the resolution in color, so both sides must be even.
        chunk = np.pad(chunk, [(0, 0), (0, chunk.shape[1] % 2), (0, chunk.shape[2] % 2), (0, 0)], mode="edge")
        if writer is None:
            size = chunk.shape[2], chunk.shape[1]
            writer = imageio_ffmpeg.write_frames(str(path), size, fps=fps, macro_block_size=2, quality=8)
            writer.send(None)
        for frame in chunk:
            writer.send(np.ascontiguousarray(frame))
        num_frames += len(chunk)
    writer.close()
    with contextlib.suppress(RuntimeError):  # ffmpeg only prints its errors, such as a full disk
        if imageio_ffmpeg.count_frames_and_secs(str(path))[0] == num_frames:
            return
    raise OSError(f"ffmpeg could not write {num_frames} frames, for the reason that it has printed")


def _write_sheet(chunks: Iterable[np.ndarray], path: Path, fps: float) -> None:
    kept, stride = [], 1
    for i, frame in enumerate(itertools.chain.from_iterable(chunks)):
        if i % stride == 0:
            kept.append(frame)
        if len(kept) > SHEET_FRAMES:
            kept, stride = kept[::2], 2 * stride
    Image.fromarray(side_by_side(np.stack(kept)[None])[0]).save(path)


_WRITERS = {".gif": _write_gif, ".mp4": _write_mp4, ".png": _write_sheet}

"""Drawings of classic control, whose pictures in gymnax need gymnasium and pygame, and of observations; animations."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SMOOTHING = 3  # shapes are drawn this many times larger and then reduced, as Pillow's have no smooth edges
CAPTION_HEIGHT = 20  # pixels above a picture
GRAY, DARK, BLUE, ORANGE, GREEN, RED = "#c9ced6", "#2f3640", "#3b7ddd", "#e08e2b", "#3a9d5d", "#d1495b"
EMPTY = (18, 20, 28)  # the color of cells without a channel

Point = tuple[float, float]
Shape = tuple[str, Sequence[Point], float]
"""A color, points, and the width of a line with round ends through them, of one point a disc; 0 for a polygon."""


def picture(left: float, right: float, bottom: float, top: float, shapes: Sequence[Shape], width: int) -> np.ndarray:
    """A frame `[H, width, 3]` uint8 of shapes in a rectangle, with x to the right and y up."""
    scale = SMOOTHING * width / (right - left)
    image = Image.new("RGB", (SMOOTHING * width, SMOOTHING * round(width * (top - bottom) / (right - left))), "#ffffff")
    draw = ImageDraw.Draw(image)
    for color, points, thickness in shapes:
        points = [(float((x - left) * scale), float((top - y) * scale)) for x, y in points]
        if not thickness:
            draw.polygon(points, fill=color)
            continue
        draw.line(points, fill=color, width=round(thickness * scale))
        for point in points:
            draw.circle(point, thickness * scale / 2, fill=color)
    return np.asarray(image.reduce(SMOOTHING))


def cart_pole(state: Any, params: Any) -> np.ndarray:
    """The cart on its track, which ends where an episode does, and the pole."""
    reach, x = params.x_threshold, state.x
    cart = [(x - 0.25, -0.15), (x + 0.25, -0.15), (x + 0.25, 0.15), (x - 0.25, 0.15)]
    pole = [(x, 0.15), _from((x, 0.15), 2 * params.length, np.pi / 2 - state.theta)]
    shapes = [(GRAY, [(-reach, 0), (reach, 0)], 0.03), (DARK, cart, 0), (ORANGE, pole, 0.09)]
    return picture(-reach - 0.4, reach + 0.4, -0.5, 1.5, shapes, 320)


def pendulum(state: Any, params: Any) -> np.ndarray:
    """The rod."""
    reach, rod = 1.25 * params.l, [(0, 0), _from((0, 0), params.l, np.pi / 2 + state.theta)]
    shapes = [(RED, rod, 0.16 * params.l), (DARK, [(0, 0)], 0.08 * params.l)]
    return picture(-reach, reach, -reach, reach, shapes, 240)


def acrobot(state: Any, params: Any) -> np.ndarray:
    """Both links, and the height that the tip must pass."""
    reach, angle = 1.1 * (params.link_length_1 + params.link_length_2), state.joint_angle1 - np.pi / 2
    joint = _from((0, 0), params.link_length_1, angle)
    tip = _from(joint, params.link_length_2, angle + state.joint_angle2)
    shapes = [(GRAY, [(-reach, 1), (reach, 1)], 0.03), (DARK, [(0, 0), joint], 0.18), (BLUE, [joint, tip], 0.18)]
    return picture(-reach, reach, -reach, reach, shapes, 240)


def mountain_car(state: Any, params: Any) -> np.ndarray:
    """The car on the hill, and the goal."""
    left, right = params.min_position, params.max_position

    def above(x, height):
        return x, 0.45 * np.sin(3 * x) + 0.55 + height

    hill = [(left, 0), *(above(x, 0) for x in np.linspace(left, right, 100)), (right, 0)]
    flag = [above(params.goal_position, height) for height in (0, 0.2)]
    shapes = [(GRAY, hill, 0), (DARK, flag, 0.012), (GREEN, flag[1:], 0.08), (RED, [above(state.position, 0.05)], 0.12)]
    return picture(left, right, 0, 1.25, shapes, 320)


def _from(start: Point, length: float, angle: float) -> Point:
    """The point at this distance from `start`; the angle is counter-clockwise from the x axis."""
    return start[0] + length * np.cos(angle), start[1] + length * np.sin(angle)


DRAWINGS: dict[str, tuple[Callable[[Any, Any], np.ndarray], float]] = {
    "CartPole-v1": (cart_pole, 50),
    "Pendulum-v1": (pendulum, 20),
    "Acrobot-v1": (acrobot, 15),
    "MountainCar-v0": (mountain_car, 30),
    "MountainCarContinuous-v0": (mountain_car, 30),
}
"""Functions `(state, params) -> [H, W, 3]` uint8 for environments of gymnax, and frames per second."""


def draw_observation(observation: np.ndarray) -> np.ndarray:
    """An image of an observation, `[H, W, 3]` uint8: each cell of a grid has the color of its last channel not 0.

    Args:
      observation: `[h, w]` or `[h, w, c]`, at least 4 by 4. With `c = 3` and at least 32 rows it has colors already:
        bytes, or numbers from 0 to 1. What is no image is a heat map: red for positive numbers, blue for negative ones.
    """
    import matplotlib  # which takes half a second

    if observation.ndim not in (2, 3) or min(observation.shape[:2]) < 4:
        numbers = observation.reshape(1, -1).astype(float).repeat(4, axis=0)
        strength = 0.5 + 0.5 * numbers / (1 + np.abs(numbers))
        return enlarge(matplotlib.colormaps["bwr"](strength, bytes=True)[..., :3])
    channels = observation[..., None] if observation.ndim == 2 else observation
    num_channels = channels.shape[-1]
    if num_channels == 3 and len(channels) >= 32:
        is_bytes = channels.dtype == np.uint8
        return enlarge(channels if is_bytes else np.rint(255 * np.clip(channels, 0, 1)).astype(np.uint8))
    last = num_channels - 1 - np.argmax(channels[..., ::-1] != 0, axis=-1)
    colors = matplotlib.colormaps["tab10"](last % 10, bytes=True)[..., :3]
    return enlarge(np.where(channels.any(axis=-1, keepdims=True), colors, np.uint8(EMPTY)))


def enlarge(image: np.ndarray, size: int = 240) -> np.ndarray:
    """A small image `[h, w, 3]`, each pixel a square, so that the longer side has about `size` pixels."""
    factor = max(1, size // max(image.shape[:2]))
    return image.repeat(factor, axis=0).repeat(factor, axis=1)


def captioned(frame: np.ndarray, text: str) -> np.ndarray:
    """A frame `[H, W, 3]` below a line of text: `[CAPTION_HEIGHT + H, W, 3]`."""
    line, font = Image.new("RGB", (frame.shape[1], CAPTION_HEIGHT), "#ffffff"), ImageFont.load_default(12)
    ImageDraw.Draw(line).text((6, CAPTION_HEIGHT / 2), text, fill=DARK, font=font, anchor="lm")
    return np.concatenate([np.asarray(line), frame])


def write_animation(frames: Iterable[np.ndarray], path: Path, fps: float) -> None:
    """Writes a GIF while its frames are made, so that a long episode need not fit in memory.

    Args:
      frames: chunks `[N, B, H, W, 3]` uint8 of `N` frames, each of `B` pictures side by side.
      path: file to write. If the disk is full, a file of this name stays as it was.
      fps: frames per second, at most 50. Frames last a multiple of 10 ms, and the last one a second more.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    duration = max(20, 10 * round(100 / fps))  # browsers slow down a GIF with shorter frames

    def images():
        of_all = itertools.chain.from_iterable(frames)
        for pictures, following in itertools.pairwise(itertools.chain(of_all, [None])):
            # A GIF has at most 256 colors. One is left for pixels that do not change.
            image = Image.fromarray(np.concatenate(pictures, axis=1)).quantize(255, dither=Image.Dither.NONE)
            image.info["duration"] = duration if following is not None else duration + 1000
            yield image

    try:
        made = images()
        next(made).save(unfinished, "GIF", save_all=True, append_images=made, loop=0)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)

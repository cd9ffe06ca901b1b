"""Drawings of classic control, whose pictures in gymnax need gymnasium and pygame, and of observations."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

SMOOTHING = 3
"""Shapes are drawn this many times larger and then reduced, as Pillow's shapes have no smooth edges."""

GRAY, DARK, BLUE, ORANGE, GREEN, RED = "#c9ced6", "#2f3640", "#3b7ddd", "#e08e2b", "#3a9d5d", "#d1495b"
EMPTY = (18, 20, 28)
CHANNELS = (
    *((84, 160, 255), (255, 202, 58), (255, 120, 90), (76, 201, 128), (200, 120, 255), (240, 240, 240)),
    *((255, 99, 164), (64, 210, 220), (176, 137, 104), (150, 160, 175), (190, 220, 70), (120, 110, 230)),
)
"""Colors of the channels of an observation."""

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
        radius = thickness * scale / 2
        if not thickness:
            draw.polygon(points, fill=color)
            continue
        draw.line(points, fill=color, width=round(2 * radius))
        for x, y in points:
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)
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
    """The car on the hill, and the flag."""
    left, right = params.min_position, params.max_position

    def above(x, height):
        return x, 0.45 * np.sin(3 * x) + 0.55 + height

    hill = [(left, 0), *(above(x, 0) for x in np.linspace(left, right, 100)), (right, 0)]
    foot, low, high = (above(params.goal_position, height) for height in (0, 0.12, 0.2))
    flag = [high, low, (low[0] + 0.09, low[1] + 0.04)]
    shapes = [
        (GRAY, hill, 0),
        (DARK, [foot, high], 0.012),
        (GREEN, flag, 0),
        (RED, [above(state.position, 0.05)], 0.12),
    ]
    return picture(left, right, 0, 1.25, shapes, 320)


DRAWINGS: dict[str, tuple[Callable[[Any, Any], np.ndarray], float]] = {
    "CartPole-v1": (cart_pole, 50),
    "Pendulum-v1": (pendulum, 20),
    "Acrobot-v1": (acrobot, 15),
    "MountainCar-v0": (mountain_car, 30),
    "MountainCarContinuous-v0": (mountain_car, 30),
}
"""Functions `(state, params) -> [H, W, 3]` uint8 for environments of gymnax, and frames per second."""


def _from(start: Point, length: float, angle: float) -> Point:
    """The point at this distance from `start`; the angle is counter-clockwise from the x axis."""
    return start[0] + length * np.cos(angle), start[1] + length * np.sin(angle)


def is_image(shape: tuple[int, ...]) -> bool:
    """Whether observations of this shape are images: `[h, w]` or `[h, w, c]`, at least 4 by 4."""
    return len(shape) in (2, 3) and min(shape[:2]) >= 4


def draw_observations(observations: np.ndarray) -> np.ndarray:
    """Images of observations: each cell of a grid has the color of its last channel that is not 0.

    Args:
      observations: `[N, h, w]` or `[N, h, w, c]`. With `c = 3` and at least 32 rows they are colors already: bytes, or
        numbers from 0 to 1. What is no image is a heat map: red for positive numbers, blue for negative ones.

    Returns:
      `[N, H, W, 3]` uint8.
    """
    if not is_image(observations.shape[1:]):
        numbers = observations.reshape(len(observations), 1, -1).astype(float).repeat(4, axis=1)
        strength = np.abs(numbers) / (1 + np.abs(numbers))  # 0 to 1
        paler = 255 * (1 - strength)
        colors = np.where(
            numbers > 0, [np.full_like(paler, 255), paler, paler], [paler, paler, np.full_like(paler, 255)]
        )
        return enlarge(np.moveaxis(colors, 0, -1).astype(np.uint8))
    if observations.ndim == 3:
        observations = observations[..., None]
    num_channels = observations.shape[-1]
    if num_channels == 3 and observations.shape[1] >= 32:
        if observations.dtype != np.uint8:
            observations = np.rint(255 * np.clip(observations, 0, 1))
        return enlarge(observations.astype(np.uint8))
    last = num_channels - np.argmax(observations[..., ::-1] != 0, axis=-1)  # 1 for the first channel
    last = np.where((observations != 0).any(axis=-1), last, 0)
    colors = np.array([EMPTY, *(CHANNELS[i % len(CHANNELS)] for i in range(num_channels))], np.uint8)
    return enlarge(colors[last])


def enlarge(images: np.ndarray, size: int = 240) -> np.ndarray:
    """Small images `[..., h, w, 3]`, each pixel a square, so that the longer side has about `size` pixels."""
    factor = max(1, size // max(images.shape[-3:-1]))
    return images.repeat(factor, axis=-3).repeat(factor, axis=-2)

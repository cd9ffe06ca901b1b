"""Drawings of environments that gymnax cannot draw itself: functions `(env, state, params) -> [H, W, 3]` uint8.

Its own pictures of CartPole, Pendulum, Acrobot and MountainCar need gymnasium and pygame.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from grpo_jax.rendering.images import CHANNELS, EMPTY, enlarge

SMOOTHING = 3
"""Shapes are drawn this many times larger and then reduced, as Pillow's shapes have no smooth edges."""

GRAY, DARK, BLUE, ORANGE, GREEN, RED = "#c9ced6", "#2f3640", "#3b7ddd", "#e08e2b", "#3a9d5d", "#d1495b"
AGENT, GOAL, ICE, HOLE = CHANNELS[0], CHANNELS[3], (214, 234, 248), EMPTY

Point = tuple[float, float]


class Canvas:
    """A picture of the rectangle from (left, bottom) to (right, top), with x to the right and y up."""

    def __init__(self, left: float, right: float, bottom: float, top: float, *, width: int = 240):
        self._left, self._top, self._scale = left, top, SMOOTHING * width / (right - left)
        size = (SMOOTHING * width, SMOOTHING * round(width * (top - bottom) / (right - left)))
        self._image = Image.new("RGB", size, "#ffffff")
        self._draw = ImageDraw.Draw(self._image)

    def polygon(self, corners: Sequence[Point], color: str) -> None:
        """Filled."""
        self._draw.polygon(self._pixels(corners), fill=color)

    def line(self, points: Sequence[Point], color: str, width: float) -> None:
        """A line with round ends; its width is in the coordinates."""
        self._draw.line(self._pixels(points), fill=color, width=round(width * self._scale))
        for end in (points[0], points[-1]):
            self.disc(end, width / 2, color)

    def disc(self, center: Point, radius: float, color: str) -> None:
        """Filled."""
        ((x, y),) = self._pixels([center])
        radius *= self._scale
        self._draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)

    def frame(self) -> np.ndarray:
        """The picture, `[H, W, 3]` uint8."""
        return np.asarray(self._image.reduce(SMOOTHING))

    def _pixels(self, points: Sequence[Point]) -> list[Point]:
        return [(float((x - self._left) * self._scale), float((self._top - y) * self._scale)) for x, y in points]


def cart_pole(env: Any, state: Any, params: Any) -> np.ndarray:
    """The cart on its track, which ends where an episode does, and the pole."""
    reach, x = params.x_threshold, state.x
    canvas = Canvas(-reach - 0.4, reach + 0.4, -0.5, 1.5, width=320)
    canvas.line([(-reach, 0), (reach, 0)], GRAY, 0.03)
    canvas.polygon([(x - 0.25, -0.15), (x + 0.25, -0.15), (x + 0.25, 0.15), (x - 0.25, 0.15)], DARK)
    canvas.line([(x, 0.15), _from((x, 0.15), 2 * params.length, np.pi / 2 - state.theta)], ORANGE, 0.09)
    return canvas.frame()


def pendulum(env: Any, state: Any, params: Any) -> np.ndarray:
    """The rod."""
    reach = 1.25 * params.l
    canvas = Canvas(-reach, reach, -reach, reach)
    canvas.line([(0, 0), _from((0, 0), params.l, np.pi / 2 + state.theta)], RED, 0.16 * params.l)
    canvas.disc((0, 0), 0.04 * params.l, DARK)
    return canvas.frame()


def acrobot(env: Any, state: Any, params: Any) -> np.ndarray:
    """Both links, and the height that the tip must pass."""
    reach, angle = 1.1 * (params.link_length_1 + params.link_length_2), state.joint_angle1 - np.pi / 2
    canvas = Canvas(-reach, reach, -reach, reach)
    canvas.line([(-reach, 1), (reach, 1)], GRAY, 0.03)
    joint = _from((0, 0), params.link_length_1, angle)
    canvas.line([(0, 0), joint], DARK, 0.18)
    canvas.line([joint, _from(joint, params.link_length_2, angle + state.joint_angle2)], BLUE, 0.18)
    return canvas.frame()


def mountain_car(env: Any, state: Any, params: Any) -> np.ndarray:
    """The car on the hill, and the flag."""
    left, right = params.min_position, params.max_position
    canvas = Canvas(left, right, 0, 1.25, width=320)

    def ground(x):
        return x, 0.45 * np.sin(3 * x) + 0.55

    canvas.polygon([(left, 0), *map(ground, np.linspace(left, right, 100)), (right, 0)], GRAY)
    x, y = ground(params.goal_position)
    canvas.line([(x, y), (x, y + 0.2)], DARK, 0.012)
    canvas.polygon([(x, y + 0.2), (x, y + 0.12), (x + 0.09, y + 0.16)], GREEN)
    x, y = ground(state.position)
    canvas.disc((x, y + 0.05), 0.06, RED)
    return canvas.frame()


def reacher(env: Any, state: Any, params: Any) -> np.ndarray:
    """The links of the arm, and the goal."""
    reach = 1.15 * env.num_joints
    canvas = Canvas(-reach, reach, -reach, reach)
    canvas.disc(state.goal_xy, 0.06 * reach, GREEN)
    joints = [(0, 0)]
    for angle in state.angles:
        joints.append(_from(joints[-1], 1, angle))
        canvas.line(joints[-2:], DARK, 0.06 * reach)
    canvas.disc(joints[-1], 0.04 * reach, BLUE)
    return canvas.frame()


def swimmer(env: Any, state: Any, params: Any) -> np.ndarray:
    """The swimmer, the urchins, and the goal."""
    canvas = Canvas(-1.5, 1.5, -1.5, 1.5)
    for place, radius, color in [
        (state.goal_xy, 0.12, GREEN),
        *((urchin, 0.1, DARK) for urchin in state.urchin_xys),
        (state.xy, 0.07, BLUE),
    ]:
        canvas.disc(place, radius, color)
    return canvas.frame()


def frozen_lake(env: Any, state: Any, params: Any) -> np.ndarray:
    """Ice, holes, the goal and the agent."""
    kinds = np.asarray(env.desc)
    cells = np.array([ICE, ICE, HOLE, GOAL], np.uint8)[kinds]  # gymnax's numbers
    cells[np.unravel_index(state.position, kinds.shape)] = AGENT
    return enlarge(cells)


def _from(start: Point, length: float, angle: float) -> Point:
    """The point at this distance from `start`; the angle is counter-clockwise from the x axis."""
    return start[0] + length * np.cos(angle), start[1] + length * np.sin(angle)

"""Drawings of gymnax's environments whose states are positions: functions `(env, state, params) -> [H, W, 3]` uint8."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

SMOOTHING = 3
"""Shapes are drawn this many times larger and then reduced, as Pillow's shapes have no smooth edges."""

GRAY, DARK, BLUE, ORANGE, GREEN, RED = "#c9ced6", "#2f3640", "#3b7ddd", "#e08e2b", "#3a9d5d", "#d1495b"

Point = tuple[float, float]


class Canvas:
    """A picture of the rectangle from (left, bottom) to (right, top), with x to the right and y up."""

    def __init__(self, left: float, right: float, bottom: float, top: float, *, width: int = 320):
        self._left, self._top, self._scale = left, top, SMOOTHING * width / (right - left)
        size = (SMOOTHING * width, SMOOTHING * round(width * (top - bottom) / (right - left)))
        self._image = Image.new("RGB", size, "#ffffff")
        self._draw = ImageDraw.Draw(self._image)

    def polygon(self, corners: Sequence[Point], color: str) -> None:
        """Filled."""
        self._draw.polygon(self._pixels(corners), fill=color)

    def line(self, points: Sequence[Point], color: str, width: float) -> None:
        """A line through the points with round ends; its width is in the coordinates."""
        self._draw.line(self._pixels(points), fill=color, width=round(width * self._scale), joint="curve")
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
    """The cart on its track, whose ends are marked, and the pole."""
    reach = params.x_threshold
    canvas = Canvas(-reach - 0.4, reach + 0.4, -0.5, 1.5)
    canvas.line([(-reach, 0), (reach, 0)], GRAY, 0.03)
    for end in (-reach, reach):
        canvas.line([(end, -0.1), (end, 0.1)], GRAY, 0.03)
    x, tip = state.x, _from((state.x, 0.15), 2 * params.length, np.pi / 2 - state.theta)
    canvas.polygon([(x - 0.25, -0.15), (x + 0.25, -0.15), (x + 0.25, 0.15), (x - 0.25, 0.15)], DARK)
    canvas.line([(x, 0.15), tip], ORANGE, 0.09)
    canvas.disc((x, 0.15), 0.03, GRAY)
    return canvas.frame()


def pendulum(env: Any, state: Any, params: Any) -> np.ndarray:
    """The rod, and the last torque as an arc around the pivot."""
    reach = 1.25 * params.l
    canvas = Canvas(-reach, reach, -reach, reach, width=240)
    turn = np.clip(state.last_u / params.max_torque, -1, 1) * np.pi / 2
    radius, angles = 0.45 * params.l, np.pi / 2 + np.linspace(0, turn, 20)
    canvas.line([_from((0, 0), radius, angle) for angle in angles], BLUE, 0.05 * params.l)
    canvas.line([(0, 0), _from((0, 0), params.l, np.pi / 2 + state.theta)], RED, 0.16 * params.l)
    canvas.disc((0, 0), 0.04 * params.l, DARK)
    return canvas.frame()


def acrobot(env: Any, state: Any, params: Any) -> np.ndarray:
    """Both links, and the height that the tip must pass."""
    reach = 1.1 * (params.link_length_1 + params.link_length_2)
    canvas = Canvas(-reach, reach, -reach, reach, width=240)
    canvas.line([(-reach, 1), (reach, 1)], GRAY, 0.03)
    angle = state.joint_angle1 - np.pi / 2
    joint = _from((0, 0), params.link_length_1, angle)
    tip = _from(joint, params.link_length_2, angle + state.joint_angle2)
    canvas.line([(0, 0), joint], DARK, 0.18)
    canvas.line([joint, tip], BLUE, 0.18)
    for place in ((0, 0), joint):
        canvas.disc(place, 0.05, ORANGE)
    return canvas.frame()


def mountain_car(env: Any, state: Any, params: Any) -> np.ndarray:
    """The car on the hill, and the flag."""
    left, right = params.min_position, params.max_position
    canvas = Canvas(left, right, 0, 1.25)

    def ground(x):
        return 0.45 * np.sin(3 * x) + 0.55

    xs = np.linspace(left, right, 100)
    canvas.polygon([(left, 0), *zip(xs, ground(xs), strict=True), (right, 0)], GRAY)
    x, y = params.goal_position, ground(params.goal_position)
    canvas.line([(x, y), (x, y + 0.2)], DARK, 0.012)
    canvas.polygon([(x, y + 0.2), (x, y + 0.12), (x + 0.09, y + 0.16)], GREEN)

    place, slope = (state.position, ground(state.position)), np.arctan(1.35 * np.cos(3 * state.position))

    def on_car(along, above):
        return _from(_from(place, along, slope), above, slope + np.pi / 2)

    canvas.polygon([on_car(-0.09, 0.03), on_car(0.09, 0.03), on_car(0.075, 0.09), on_car(-0.075, 0.09)], RED)
    for along in (-0.05, 0.05):
        canvas.disc(on_car(along, 0.025), 0.025, DARK)
    return canvas.frame()


def point_robot(env: Any, state: Any, params: Any) -> np.ndarray:
    """The half circle of goals, the goal, and the robot."""
    reach = params.circle_radius + 0.4
    canvas = Canvas(-reach, reach, -0.4, reach)
    canvas.line([_from((0, 0), params.circle_radius, angle) for angle in np.linspace(0, np.pi, 60)], GRAY, 0.02)
    canvas.disc(state.goal, params.goal_radius, GREEN)
    canvas.disc(state.pos, 0.05, BLUE)
    return canvas.frame()


def reacher(env: Any, state: Any, params: Any) -> np.ndarray:
    """The links of the arm, and the goal."""
    reach = 1.15 * env.num_joints
    canvas = Canvas(-reach, reach, -reach, reach, width=240)
    canvas.disc(state.goal_xy, 0.06 * reach, GREEN)
    joints = [(0, 0)]
    for angle in state.angles:
        joints.append(_from(joints[-1], 1, angle))
    for start, end in zip(joints, joints[1:], strict=False):
        canvas.line([start, end], DARK, 0.06 * reach)
        canvas.disc(start, 0.02 * reach, ORANGE)
    canvas.disc(joints[-1], 0.04 * reach, BLUE)
    return canvas.frame()


def swimmer(env: Any, state: Any, params: Any) -> np.ndarray:
    """The swimmer, the urchins, and the goal."""
    canvas = Canvas(-1.5, 1.5, -1.5, 1.5, width=240)
    canvas.disc(state.goal_xy, 0.12, GREEN)
    for urchin in state.urchin_xys:
        canvas.disc(urchin, 0.1, DARK)
    canvas.disc(state.xy, 0.07, BLUE)
    return canvas.frame()


def _from(start: Point, length: float, angle: float) -> Point:
    """The point at this distance from `start`; the angle is counter-clockwise from the x axis."""
    return start[0] + length * np.cos(angle), start[1] + length * np.sin(angle)

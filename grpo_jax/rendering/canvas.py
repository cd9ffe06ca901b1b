"""A picture to draw on, in the coordinates of the environment."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

SMOOTHING = 3
"""Shapes are drawn this many times larger and then reduced, as Pillow's shapes have no smooth edges."""

WHITE, GRAY, DARK = "#ffffff", "#c9ced6", "#2f3640"
BLUE, ORANGE, GREEN, RED = "#3b7ddd", "#e08e2b", "#3a9d5d", "#d1495b"

Point = tuple[float, float]


class Canvas:
    """A picture of the rectangle from (left, bottom) to (right, top), with x to the right and y up."""

    def __init__(
        self, left: float, right: float, bottom: float, top: float, *, width: int = 320, background: str = WHITE
    ):
        self._left, self._top = left, top
        self._scale = SMOOTHING * width / (right - left)
        size = (SMOOTHING * width, SMOOTHING * round(width * (top - bottom) / (right - left)))
        self._image = Image.new("RGB", size, background)
        self._draw = ImageDraw.Draw(self._image)

    def polygon(self, corners: Sequence[Point], color: str) -> None:
        """A filled polygon."""
        self._draw.polygon(self._pixels(corners), fill=color)

    def line(self, points: Sequence[Point], color: str, width: float) -> None:
        """A line through the points with round ends; its width is in the coordinates."""
        self._draw.line(self._pixels(points), fill=color, width=round(width * self._scale), joint="curve")
        for end in (points[0], points[-1]):
            self.disc(end, width / 2, color)

    def disc(self, center: Point, radius: float, color: str) -> None:
        """A filled circle."""
        ((x, y),) = self._pixels([center])
        radius *= self._scale
        self._draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)

    def frame(self) -> np.ndarray:
        """The picture, `[H, W, 3]` uint8."""
        return np.asarray(self._image.reduce(SMOOTHING))

    def _pixels(self, points: Sequence[Point]) -> list[Point]:
        return [(float((x - self._left) * self._scale), float((self._top - y) * self._scale)) for x, y in points]

"""Images of observations that are grids of cells, or colours already."""

import numpy as np

EMPTY = (18, 20, 28)
CHANNELS = (
    *((84, 160, 255), (255, 202, 58), (255, 120, 90), (76, 201, 128), (200, 120, 255), (240, 240, 240)),
    *((255, 99, 164), (64, 210, 220), (176, 137, 104), (150, 160, 175), (190, 220, 70), (120, 110, 230)),
)
"""Colors of the channels of an observation."""


def is_image(shape: tuple[int, ...]) -> bool:
    """Whether observations of this shape are drawn: `[h, w]` or `[h, w, c]`, at least 4 by 4."""
    return len(shape) in (2, 3) and min(shape[:2]) >= 4


def draw_observations(observations: np.ndarray) -> np.ndarray:
    """Images of observations; a cell has the color of its last channel that is not 0.

    Args:
      observations: `[N, h, w]` or `[N, h, w, c]`. With `c = 3` and at least 32 rows they are colors already: bytes, or
        numbers from 0 to 1.

    Returns:
      `[N, H, W, 3]` uint8.
    """
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

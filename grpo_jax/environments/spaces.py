"""Action spaces: static, hashable values with sizes and bounds."""

from typing import NamedTuple


class Discrete(NamedTuple):
    """One of `num_actions` actions: an integer scalar."""

    num_actions: int


class MultiDiscrete(NamedTuple):
    """One action in each of several dimensions: integers `[len(num_actions)]`."""

    num_actions: tuple[int, ...]


class Box(NamedTuple):
    """A real vector `[len(low)]` between bounds that may be infinite."""

    low: tuple[float, ...]
    high: tuple[float, ...]


ActionSpace = Discrete | MultiDiscrete | Box

"""What several suites share: checks of names, and episodes that are counted."""

from collections.abc import Iterable
from typing import Any

from flax import struct

from grpo_jax.environments.parameters import TimeLimit
from grpo_jax.errors import ConfigError, nearest


def check_known(suite: str, name: str, known: Iterable[str]) -> None:
    """Raises ConfigError, which names the nearest ones, if a suite has no environment of this name."""
    if name not in known:
        raise ConfigError(f"{suite} has no environment {name!r}: {nearest(name, known)}")


@struct.dataclass
class TimedState:
    """The state of an environment that does not count its own steps, and the count."""

    inner: Any
    time: int


class Timed:
    """Base class of environments with a `TimedState`."""

    def __init__(self, inner: Any, max_steps: int):
        self.inner, self.default_params = inner, TimeLimit(max_steps)

    def is_truncated(self, state, params):
        return state.time >= params.max_steps_in_episode

"""Environments that do not count their own steps."""

from typing import Any

from flax import struct

from grpo_jax.environments.parameters import TimeLimit


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
        """As in gymnax."""
        return state.time >= params.max_steps_in_episode

"""Environments of other suites that do not count their own steps."""

from typing import Any

from flax import struct

from grpo_jax.environments.parameters import TimeLimit


@struct.dataclass
class TimedState:
    """The state of an environment, and its number of steps."""

    inner: Any
    time: int


class Timed:
    """Base class of environments with a `TimedState`."""

    def __init__(self, inner: Any, max_steps: int):
        self.inner, self.default_params = inner, TimeLimit(max_steps)

    def is_truncated(self, state, params):
        return state.time >= params.max_steps_in_episode

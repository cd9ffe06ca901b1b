"""The one interface of every environment: a state is a value, and nothing resets by itself."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from grpo_jax.spaces import ActionSpace


class Transition(NamedTuple):
    """Where one step leads, before any reset."""

    environment: Any  # the new state
    observation: jax.Array  # of the new state, also when it is a final one
    reward: jax.Array  # float32 scalar
    terminated: jax.Array  # bool: nothing follows this state
    truncated: jax.Array  # bool: only the time limit ends the episode here


class Environment(NamedTuple):
    """Pure functions of a single environment; `vmap` makes many of it."""

    name: str
    reset: Callable  # (key) -> state, observation
    step: Callable  # (key, state, action) -> Transition
    observation: jax.ShapeDtypeStruct  # of one observation
    action_space: ActionSpace
    max_steps: int  # the time limit: an episode is truncated at this length, and never earlier

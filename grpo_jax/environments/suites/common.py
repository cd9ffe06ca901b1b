"""What several suites share: checks of names, episodes that are counted, and encodings."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
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


def one_hot_layers(cells: jax.Array, sizes: Sequence[int]) -> jax.Array:
    """Cells `[..., L]` of L integers each as int8 `[..., sum(sizes)]`: a one-hot vector for each integer, side by side.

    A dense layer or a convolution on them equals one on the sum of learnt embeddings of the L integers. An integer
    outside its range becomes zeros.
    """
    layers = [jax.nn.one_hot(cells[..., i], size, dtype=jnp.int8) for i, size in enumerate(sizes)]
    return jnp.concatenate(layers, axis=-1)

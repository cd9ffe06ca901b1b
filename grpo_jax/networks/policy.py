"""The one interface of every policy network."""

from collections.abc import Callable
from typing import NamedTuple

from grpo_jax.distributions import Distribution


class Policy(NamedTuple):
    """Pure functions of an actor and, if it has one, its critic."""

    init: Callable  # (key) -> params
    initial_carry: Callable  # (num_envs) -> carry; () for a policy without memory
    step: Callable  # (params, observation [B, ...], carry) -> distribution parameters, value [B] or None, carry
    sequence: Callable  # (params, observation [S, N, ...]) -> distribution parameters, value [S, N] or None
    distribution: Distribution
    has_critic: bool

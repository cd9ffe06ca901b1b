"""The one interface of every policy."""

from collections.abc import Callable
from typing import NamedTuple

from grpo_jax.policies.distributions import Distribution


class Policy(NamedTuple):
    """Pure functions of an actor and, if it has one, its critic.

    The carry is the memory, each leaf `[N, ...]`; without memory it has no leaves. `starts` says where an observation
    is the first of its episode; the carry is then replaced by the initial one before the observation is processed.
    """

    init: Callable  # (key) -> params
    initial_carry: Callable  # (params, num_envs, prompt [num_envs, P] or None) -> carry at the start of an episode
    step: Callable  # (params, observation [N, ...], carry) -> distribution parameters [N, P], value [N] or None, carry
    sequence: Callable  # (params, observation [S, N, ...], carry, starts [S, N]) -> [S, N, P], value [S, N] or None
    distribution: Distribution
    has_critic: bool
    has_carry: bool  # whether a sequence is more than its steps, each by itself
    sequence_carry: Callable = lambda carry: carry  # (carry) -> as much of it as sequence reads
    # (params, observation [S, N, ...], carry, starts [S, N]) -> [S, N, F]: what the actor's head reads; None: not told
    features: Callable | None = None
    max_steps: int | None = None  # the most steps that the carry can take; None for any number
    support: Callable | None = None  # (parameters [N, P]) -> bool [N, num_actions]: what may be sampled; None for all

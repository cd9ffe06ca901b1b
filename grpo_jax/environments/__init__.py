"""Environments as pure functions: gymnax's and other suites' by name, a custom one as an object or by its path.

`tokens` holds the token tasks, their rewards and all that a custom task needs.
"""

from grpo_jax.environments import tokens
from grpo_jax.environments.environment import Environment, Transition, transition
from grpo_jax.environments.host import HostEnvironment
from grpo_jax.environments.parameters import EnvParams, group_parameters, row_parameters
from grpo_jax.environments.registry import make_environment
from grpo_jax.environments.spaces import ActionSpace, Box, Discrete, MultiDiscrete

__all__ = [
    "ActionSpace",
    "Box",
    "Discrete",
    "EnvParams",
    "Environment",
    "HostEnvironment",
    "MultiDiscrete",
    "Transition",
    "group_parameters",
    "make_environment",
    "row_parameters",
    "tokens",
    "transition",
]

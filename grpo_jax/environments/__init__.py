"""Environments as pure functions of one state: gymnax's and other suites' by name, your own by object or path."""

from grpo_jax.environments.environment import Environment, Transition
from grpo_jax.environments.parameters import EnvParams, parameters_of_groups, parameters_of_rows
from grpo_jax.environments.registry import make_environment

__all__ = [
    "EnvParams",
    "Environment",
    "Transition",
    "make_environment",
    "parameters_of_groups",
    "parameters_of_rows",
]

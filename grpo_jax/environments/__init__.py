"""Environments as pure functions of one state; gymnax ones by name."""

from grpo_jax.environments.environment import Environment, Transition
from grpo_jax.environments.gymnax_adapter import make_environment

__all__ = ["Environment", "Transition", "make_environment"]

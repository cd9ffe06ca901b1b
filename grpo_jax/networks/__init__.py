"""Policies: an actor with an optional critic behind one interface, with or without memory."""

from grpo_jax.networks.mlp import make_mlp_policy
from grpo_jax.networks.policy import Policy

__all__ = ["Policy", "make_mlp_policy"]

"""Policies: an actor with an optional critic behind one interface, with or without memory."""

from grpo_jax.networks.policy import Policy, make_policy
from grpo_jax.networks.token_policy import make_token_policy
from grpo_jax.networks.transformer import Architecture

__all__ = ["Architecture", "Policy", "make_policy", "make_token_policy"]

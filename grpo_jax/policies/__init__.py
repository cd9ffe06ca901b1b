"""Policies: an actor with an optional critic behind one interface, with or without memory."""

from grpo_jax.policies.actor_critic import make_policy
from grpo_jax.policies.policy import Policy
from grpo_jax.policies.token_policy import make_token_policy
from grpo_jax.policies.transformer import Architecture

__all__ = ["Architecture", "Policy", "make_policy", "make_token_policy"]

"""Policies: an actor with an optional critic behind one interface, with or without memory."""

from grpo_jax.networks.policy import Policy, make_policy

__all__ = ["Policy", "make_policy"]

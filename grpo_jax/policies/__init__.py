"""Policies: an actor and an optional critic behind one interface, feed-forward, recurrent or transformer."""

from grpo_jax.policies.custom import make_pure_policy
from grpo_jax.policies.distributions import (
    Distribution,
    categorical,
    diagonal_gaussian,
    make_distribution,
    multi_categorical,
)
from grpo_jax.policies.networks import CNN, MLP
from grpo_jax.policies.policy import Policy, bind_frozen, combine, partition
from grpo_jax.policies.sampling import SamplingHyperparams
from grpo_jax.policies.token_policy import make_token_policy
from grpo_jax.policies.transformer import Transformer, add_lora, merge_lora

__all__ = [
    "CNN",
    "MLP",
    "Distribution",
    "Policy",
    "SamplingHyperparams",
    "Transformer",
    "add_lora",
    "bind_frozen",
    "categorical",
    "combine",
    "diagonal_gaussian",
    "make_distribution",
    "make_pure_policy",
    "make_token_policy",
    "merge_lora",
    "multi_categorical",
    "partition",
]

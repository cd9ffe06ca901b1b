"""Families of action distributions: pure functions of their parameters, which are the output of a policy."""

from grpo_jax.policies.distributions.discrete import categorical, multi_categorical
from grpo_jax.policies.distributions.distribution import Distribution
from grpo_jax.policies.distributions.factory import make_distribution
from grpo_jax.policies.distributions.gaussian import diagonal_gaussian, squashed_gaussian

__all__ = [
    "Distribution",
    "categorical",
    "diagonal_gaussian",
    "make_distribution",
    "multi_categorical",
    "squashed_gaussian",
]

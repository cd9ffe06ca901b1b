"""Action distributions: families of pure functions of a policy's output."""

from grpo_jax.distributions.discrete import categorical, multi_categorical
from grpo_jax.distributions.distribution import Distribution
from grpo_jax.distributions.gaussian import diagonal_gaussian, squashed_gaussian
from grpo_jax.distributions.of_space import make_distribution

__all__ = [
    "Distribution",
    "categorical",
    "diagonal_gaussian",
    "make_distribution",
    "multi_categorical",
    "squashed_gaussian",
]

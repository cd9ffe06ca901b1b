"""How actions are drawn from a policy: what it sees, at which temperature, from how many actions."""

import jax
import jax.numpy as jnp

from grpo_jax.config import Config
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.masking import most_probable
from grpo_jax.networks import Policy
from grpo_jax.normalization import Normalizer, normalized

COLDEST = 1e-6  # logits are divided by no less


def acting_policy(config: Config, normalizer: Normalizer, hyperparams: Hyperparams) -> Policy:
    """The policy as it acts and as it learns, so that both mean the same distribution."""
    policy = normalized(config.policy, normalizer.observation, hyperparams.observation_clip)
    if config.is_transformer:
        policy = tempered(policy, hyperparams.temperature)
    if config.truncate_sampling:
        policy = truncated(policy, hyperparams.top_k, hyperparams.top_p)
    return policy


def tempered(policy: Policy, temperature: jax.Array) -> Policy:
    """The policy with its logits divided by a temperature; at 0 it takes the most probable action."""
    temperature = jnp.maximum(temperature, COLDEST)

    def step(*arguments):
        logits, *rest = policy.step(*arguments)
        return logits / temperature, *rest

    def sequence(*arguments):
        logits, value = policy.sequence(*arguments)
        return logits / temperature, value

    return policy._replace(step=step, sequence=sequence)


def truncated(policy: Policy, top_k: jax.Array, top_p: jax.Array) -> Policy:
    """The policy drawing from its most probable actions alone: see `masking.most_probable`.

    Rollouts keep which these were, and an update takes the probabilities among the same ones.
    """
    return policy._replace(support=lambda logits: most_probable(logits, top_k, top_p))

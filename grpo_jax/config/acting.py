"""The policy of a `Config` as it acts and learns: normalised, tempered, truncated."""

from grpo_jax.config.config import Config
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.policies import Policy
from grpo_jax.policies.normalization import Normalizer, normalized
from grpo_jax.policies.sampling import tempered, truncated


def acting_policy(config: Config, normalizer: Normalizer, hyperparams: Hyperparams) -> Policy:
    """The policy as it acts and as it learns, so that both mean the same distribution."""
    policy = normalized(config.policy, normalizer.observation, hyperparams.observation_clip)
    if config.is_transformer:
        policy = tempered(policy, hyperparams.temperature)
    if config.truncate_sampling:
        policy = truncated(policy, hyperparams.top_k, hyperparams.top_p)
    return policy

"""Actions of a policy for observations from anywhere."""

import jax

from grpo_jax.config import Config, behaviour_policy
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.policies.normalization import Normalizer
from grpo_jax.policies.sampling import apply_sampling_mask
from grpo_jax.types import PyTree


def choose_actions(
    config: Config,
    params: PyTree,
    normalizer: Normalizer,
    hyperparams: Hyperparams,
    observation: PyTree,
    carry: PyTree,
    key: jax.Array | None = None,
    action_mask: jax.Array | None = None,
) -> tuple[jax.Array, PyTree]:
    """Actions for `N` observations, both as the environment gives and takes them, and the policy's next carry. Pure.

    Args:
      config: the run that the policy comes from.
      params, normalizer, hyperparams: of one row of it.
      observation, carry: each leaf `[N, ...]`.
      key: of samples; None takes the most probable actions, or for squashed actions the medians.
      action_mask: bool `[N, num_actions]`, the legal actions; None if all are.
    """
    policy = behaviour_policy(config, normalizer, hyperparams)
    codec = config.env.codec
    parameters, _, carry = policy.step(params, jax.vmap(codec.encode)(observation), carry)
    parameters, _ = apply_sampling_mask(policy, parameters, action_mask)
    distribution = policy.distribution
    action = distribution.mode(parameters) if key is None else distribution.sample(parameters, key)
    return jax.vmap(codec.decode)(distribution.to_environment(action)), carry

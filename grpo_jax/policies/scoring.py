"""Log-probabilities and entropies of long sequences whose distributions do not fit into memory all at once."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.policies.policy import Policy
from grpo_jax.types import PyTree


class Scores(NamedTuple):
    """What an update needs to know of a distribution, each `[S, N]`."""

    log_prob: jax.Array  # of the actions
    entropy: jax.Array
    value: jax.Array | None  # None without a critic


def score(
    policy: Policy, params: PyTree, observation: PyTree, carry: PyTree, is_first: jax.Array, action: jax.Array
) -> Scores:
    """The scores of actions, from distributions of `policy.logits_chunk` steps at a time.

    The gradient computes each chunk's distributions again instead of keeping them, so that neither pass has an array
    with the parameters of all `S * N` distributions.

    Args:
      policy: one with the functions `features` and `head`.
      params, observation, carry, is_first: as of `policy.sequence`.
      action: `[S, N]` or `[S, N, D]`.
    """
    family, num_steps, size = policy.distribution, is_first.size, min(policy.logits_chunk, is_first.size)
    features = policy.features(params, observation, carry, is_first)
    value = policy.sequence(params, observation, carry, is_first)[1] if policy.has_critic else None
    num_chunks = -(-num_steps // size)

    def chunks(leaf):
        rows = leaf.reshape(num_steps, *leaf.shape[is_first.ndim :])
        padding = [(0, num_chunks * size - num_steps)] + [(0, 0)] * (rows.ndim - 1)
        return jnp.pad(rows, padding).reshape(num_chunks, size, *rows.shape[1:])

    @jax.checkpoint
    def of_chunk(chunk):
        features, action = chunk
        distribution = policy.head(params, features)
        return family.log_prob(distribution, action), family.entropy(distribution)

    scores = jax.lax.map(of_chunk, (chunks(features), chunks(action)))
    log_prob, entropy = (leaf.reshape(-1)[:num_steps].reshape(is_first.shape) for leaf in scores)
    return Scores(log_prob, entropy, value)

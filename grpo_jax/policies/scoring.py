"""Log-probabilities and entropies of long sequences whose distributions do not fit into memory all at once."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.policies.policy import Policy
from grpo_jax.types import PyTree


class Scores(NamedTuple):
    """Numbers that an update needs of its distributions, each `[S, N]`."""

    log_prob: jax.Array  # of the actions
    entropy: jax.Array
    value: jax.Array | None  # None without a critic


def score(
    policy: Policy, params: PyTree, observation: PyTree, carry: PyTree, is_first: jax.Array, action: jax.Array
) -> Scores:
    """The scores of actions, from about `policy.logits_chunk` distributions at a time.

    A chunk is a number of whole steps, at least one: environments that are split over devices stay where they are. The
    gradient computes the distributions of each chunk again instead of keeping them, so that neither pass has an array
    with the parameters of all `S * N` distributions.

    Args:
      policy: one with the functions `features` and `head`.
      params, observation, carry, is_first: as of `policy.sequence`.
      action: `[S, N]` or `[S, N, D]`.
    """
    (num_steps, num_sequences), family = is_first.shape, policy.distribution
    length = min(num_steps, max(1, policy.logits_chunk // num_sequences))
    num_chunks = -(-num_steps // length)
    features = policy.features(params, observation, carry, is_first)
    value = policy.sequence(params, observation, carry, is_first)[1] if policy.has_critic else None

    def chunks(leaf):
        padding = [(0, num_chunks * length - num_steps)] + [(0, 0)] * (leaf.ndim - 1)
        return jnp.pad(leaf, padding).reshape(num_chunks, length, *leaf.shape[1:])

    @jax.checkpoint
    def of_chunk(chunk):
        features, action = chunk
        distribution = policy.head(params, features)
        return family.log_prob(distribution, action), family.entropy(distribution)

    scores = jax.lax.map(of_chunk, (chunks(features), chunks(action)))
    log_prob, entropy = (leaf.reshape(-1, num_sequences)[:num_steps] for leaf in scores)
    return Scores(log_prob, entropy, value)

"""Log-probabilities, entropies and divergences of distributions that do not fit into memory all at once."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.policies.policy import Policy
from grpo_jax.policies.sampling import mask_actions_by_bits
from grpo_jax.types import PyTree


class Scores(NamedTuple):
    """Numbers that an update needs of its distributions, each `[S, N]`."""

    log_prob: jax.Array  # of the actions
    entropy: jax.Array
    kl_reference: jax.Array | None  # exact KL(policy || reference); None without features of the reference


def bind_reference(policy: Policy, params: PyTree) -> Policy:
    """The policy with the head of a reference policy, which has these parameters, as a constant."""
    return policy._replace(reference_head=policy.head and functools.partial(policy.head, params))


def score(
    policy: Policy,
    params: PyTree,
    features: jax.Array,
    action: jax.Array,
    reference_features: jax.Array | None = None,
    action_mask: jax.Array | None = None,
) -> Scores:
    """The scores of actions, from about `policy.logits_chunk` distributions at a time.

    A chunk is a number of whole steps, at least one: environments that are split over devices stay where they are. The
    gradient computes the distributions of each chunk again instead of keeping them, so that neither pass has an array
    with the parameters of all `S * N` distributions.

    Args:
      policy: one with the functions `features` and `head`.
      params: of the head.
      features: `[S, N, F]`, the policy's.
      action: `[S, N]` or `[S, N, D]`.
      reference_features: `[S, N, F]` of the reference policy, if `bind_reference` has given its head to the policy.
      action_mask: uint8 `[S, N, ceil(num_actions / 8)]`: the actions that might be sampled, as bits (`pack_mask`).
    """
    (num_steps, num_sequences), family = features.shape[:2], policy.distribution
    length = min(num_steps, max(1, policy.logits_chunk // num_sequences))
    num_chunks = -(-num_steps // length)

    def chunks(leaf):
        padding = [(0, num_chunks * length - num_steps)] + [(0, 0)] * (leaf.ndim - 1)
        return jnp.pad(leaf, padding).reshape(num_chunks, length, *leaf.shape[1:])

    @jax.checkpoint
    def of_chunk(chunk):
        features, action, reference_features, bits = chunk
        distribution, kl = mask_actions_by_bits(policy.head(params, features), bits), None
        if reference_features is not None:
            kl = family.kl(distribution, mask_actions_by_bits(policy.reference_head(reference_features), bits))
        return Scores(family.log_prob(distribution, action), family.entropy(distribution), kl)

    scores = jax.lax.map(of_chunk, jax.tree.map(chunks, (features, action, reference_features, action_mask)))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, num_sequences)[:num_steps], scores)

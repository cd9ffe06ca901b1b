"""Changes to the distribution that is sampled from: action masks, temperature, top-k, top-p and min-p.

`score` computes what an update needs of distributions that do not fit into memory all at once.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import broadcast_to_rank

from grpo_jax.hyperparams import SHARE, Hyperparams, at_least_1, number
from grpo_jax.policies.policy import Policy
from grpo_jax.precision import at_least_float32
from grpo_jax.types import PyTree

MIN_TEMPERATURE = 1e-6  # logits are divided by no less


class SamplingHyperparams(Hyperparams):
    """`Hyperparams` with the numbers of `Config(truncate_sampling=True)`, which say what tokens may be sampled."""

    top_k: float = number(math.inf, at_least_1("leaves no token to sample; use 1 or more, or inf for all"), limit=True)
    """Number of most probable tokens that may be sampled."""
    top_p: float = number(1.0, SHARE)
    """Least total probability of the most probable tokens that may be sampled."""
    min_p: float = number(0.0, SHARE)
    """Least probability of a sampled token, relative to the most probable one."""

    @property
    def truncates(self) -> bool:
        """Whether the numbers of any row leave out tokens."""
        return bool(np.min(self.top_k) < math.inf or np.min(self.top_p) < 1 or np.max(self.min_p) > 0)


def with_temperature(policy: Policy, temperature: jax.Array) -> Policy:
    """The policy with its logits divided by a temperature; at 0 it takes the most probable action."""
    temperature = jnp.maximum(temperature, MIN_TEMPERATURE)
    return change_logits(policy, lambda logits: logits / temperature)


def change_logits(policy: Policy, change: Callable[[jax.Array], jax.Array]) -> Policy:
    """The policy with changed logits, in rollouts and in updates."""

    def on_first(function):
        def changed(*arguments):
            logits, *others = function(*arguments)
            return change(logits), *others

        return changed

    policy = policy.map(on_first, ("step", "sequence"))
    return policy.map(lambda head: lambda *arguments: change(head(*arguments)), ("head",))


def with_truncation(policy: Policy, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> Policy:
    """The policy that samples only from its `most_probable` actions, whose mask rollouts store for updates."""
    return policy._replace(sampling_mask=lambda logits: most_probable(logits, top_k, top_p, min_p))


def apply_sampling_mask(
    policy: Policy, parameters: jax.Array, action_mask: jax.Array | None, forced: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """The distribution's parameters and the mask of the actions that may be sampled, both `[..., num_actions]`.

    Args:
      policy: may restrict the actions itself (see `with_truncation`).
      parameters: the policy's, for an observation.
      action_mask: the environment's legal actions; None if all are.
      forced: `[...]` bool: no action is masked, so that the environment's own has a finite log-probability.
    """
    if policy.sampling_mask is not None:
        action_mask = policy.sampling_mask(mask_actions(parameters, action_mask))
    if forced is not None and action_mask is not None:
        action_mask |= forced[..., None]
    return mask_actions(parameters, action_mask), action_mask


def mask_actions(logits: jax.Array, mask: jax.Array | None) -> jax.Array:
    """The logits with -inf for illegal actions, whose probability and gradient are then 0.

    The policy gradient stays valid if rollouts and updates use the same mask (https://arxiv.org/abs/2006.14171).

    Args:
      logits: `[..., num_actions]`.
      mask: `[..., num_actions]` bool, True for legal actions, or its bits, from `jnp.packbits`; None if all actions
        are always legal. A state without any legal action, such as one after the end of an episode, is not masked.
    """
    if mask is None:
        return logits
    if mask.dtype == jnp.uint8:
        mask = jnp.unpackbits(mask, axis=-1, count=logits.shape[-1]).astype(bool)
    return jnp.where(mask | ~jnp.any(mask, axis=-1, keepdims=True), logits, -jnp.inf)


def most_probable(logits: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array | float = 0.0) -> jax.Array:
    """Top-k, then top-p (nucleus) and min-p sampling: the mask of the actions that may be sampled.

    Top-k keeps the `top_k` most probable actions and renormalises their probabilities. Top-p keeps the fewest of these
    whose probabilities add up to at least `top_p` (https://arxiv.org/abs/1904.09751). Min-p
    keeps the actions with at least `min_p` times the probability of the most probable one
    (https://arxiv.org/abs/2407.01082). Of equally probable actions top-k and top-p keep the first.

    Args:
      logits: `[..., num_actions]`; an action with -inf is never kept.
      top_k: at least 1; inf keeps all.
      top_p: from 0, which keeps the most probable action, to 1, which keeps all of the top k.
      min_p: from 0, which keeps all of these, to 1, which keeps those as probable as the first.

    Returns:
      `[..., num_actions]` bool.
    """
    logits = at_least_float32(logits)
    order = jnp.argsort(-logits, axis=-1)
    rank = broadcast_to_rank(jnp.arange(logits.shape[-1]), logits.ndim)
    ordered = jnp.where(rank.astype(float) < top_k, jnp.take_along_axis(logits, order, axis=-1), -jnp.inf)
    probability = jax.nn.softmax(ordered)
    before = jnp.cumsum(probability, axis=-1) - probability
    kept = ((before < top_p) | (top_p >= 1.0)) & (ordered > -jnp.inf)
    kept = (rank == 0) | (kept & (ordered >= ordered[..., :1] + jnp.log(min_p)))
    return jnp.put_along_axis(jnp.zeros(logits.shape, bool), order, kept, axis=-1, inplace=False)


class Scores(NamedTuple):
    """Numbers that an update needs of its distributions, each `[S, N]`."""

    log_prob: jax.Array  # of the actions
    entropy: jax.Array


def score(
    policy: Policy,
    params: PyTree,
    features: jax.Array,
    action: jax.Array,
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
      action_mask: `[S, N, num_actions]` bool, or its bits: the actions that might be sampled (see `mask_actions`).
    """
    (num_steps, num_sequences), family = features.shape[:2], policy.distribution
    num_chunks = -(-num_steps // max(1, policy.logits_chunk // num_sequences))
    length = -(-num_steps // num_chunks)  # all about as long, so that few steps are padding

    def chunks(leaf):
        padding = [(0, num_chunks * length - num_steps)] + [(0, 0)] * (leaf.ndim - 1)
        return jnp.pad(leaf, padding).reshape(num_chunks, length, *leaf.shape[1:])

    @jax.checkpoint
    def of_chunk(chunk):
        features, action, mask = chunk
        distribution = mask_actions(policy.head(params, features), mask)
        return Scores(family.log_prob(distribution, action), family.entropy(distribution))

    scores = jax.lax.map(of_chunk, jax.tree.map(chunks, (features, action, action_mask)))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, num_sequences)[:num_steps], scores)

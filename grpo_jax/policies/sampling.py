"""Which actions may be sampled, and how probable they are: masks, temperature, top-k and top-p."""

import jax
import jax.numpy as jnp

from grpo_jax.policies import Policy
from grpo_jax.precision import at_least_float32

COLDEST = 1e-6  # logits are divided by no less


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


def mask_actions(logits: jax.Array, mask: jax.Array | None) -> jax.Array:
    """The logits, -inf where an action is illegal: its probability is 0, and no gradient flows into its logit.

    The policy gradient stays a valid one if rollout and update mask alike (https://arxiv.org/abs/2006.14171).

    Args:
      logits: `[..., num_actions]`.
      mask: `[..., num_actions]` bool, True for the legal actions; None where all always are. A state without a legal
        action, such as one after an episode's end, is not masked.
    """
    if mask is None:
        return logits
    return jnp.where(mask | ~jnp.any(mask, axis=-1, keepdims=True), logits, -jnp.inf)


def most_probable(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """The fewest, most probable actions that have at least `top_p` of the probability of the `top_k` most probable.

    Of actions that are equally probable, those that come first. (Nucleus: https://arxiv.org/abs/1904.09751.)

    Args:
      logits: `[..., num_actions]`; an action of -inf is never among them.
      top_k: how many at most, a real number of at least 1; inf for all.
      top_p: between 0, which leaves the most probable action, and 1, which leaves all of the `top_k`.

    Returns:
      `[..., num_actions]` bool.
    """
    logits = at_least_float32(logits)
    order = jnp.argsort(-logits, axis=-1)
    rank = jnp.arange(logits.shape[-1])
    ordered = jnp.where(rank < top_k, jnp.take_along_axis(logits, order, axis=-1), -jnp.inf)
    probability = jax.nn.softmax(ordered)
    before = jnp.cumsum(probability, axis=-1) - probability
    kept = (rank == 0) | (((before < top_p) | (top_p >= 1.0)) & (ordered > -jnp.inf))
    return jnp.put_along_axis(jnp.zeros(logits.shape, bool), order, kept, axis=-1, inplace=False)

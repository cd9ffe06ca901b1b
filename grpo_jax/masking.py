"""Actions that are not to be taken: illegal ones, improbable ones."""

import jax
import jax.numpy as jnp

from grpo_jax.precision import at_least_float32


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

"""Actions that are illegal in a state."""

import jax
import jax.numpy as jnp


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

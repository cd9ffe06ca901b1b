"""Reward transforms: what is done to the rewards of a rollout before they are compared."""

import jax
import jax.numpy as jnp


def overlong_punishment(lengths: jax.Array, *, max_length: float, buffer: float) -> jax.Array:
    """A penalty that grows linearly over the last `buffer` steps before the limit, to be added to the score.

        0                                       if length <= max_length - buffer
        (max_length - buffer - length) / buffer up to max_length
        -1                                      beyond

    DAPO's soft overlong punishment (https://arxiv.org/abs/2503.14476, equation 13).

    Args:
      lengths: number of steps of each rollout, any shape.
      max_length: the limit, in steps.
      buffer: width of the ramp, in steps; 0 punishes only what exceeds the limit.

    Returns:
      The same shape, in [-1, 0].
    """
    excess = lengths - (max_length - buffer)
    # A ramp of less than a step is a step: lengths are whole numbers.
    return -jnp.clip(excess / jnp.maximum(buffer, 0.5), 0.0, 1.0)


def weighted(rewards: jax.Array, weights: jax.Array) -> jax.Array:
    """The weighted sum of several reward components.

        r = sum_k w_k r_k

    `advantages.decoupled_normalized` normalises each of them by itself first.

    Args:
      rewards: `[num_rewards, ...]`, one component after the other.
      weights: `[num_rewards]`.

    Returns:
      `[...]`.
    """
    return jnp.tensordot(jnp.asarray(weights), rewards, axes=1)

"""Reductions: how much each step weighs in the loss.

A reduction maps a mask `[T, N]`, true on the valid steps, to weights `[T, N]`, so that `loss = sum(weights * x)`; all
are 0 if no step is valid. Weights are computed for a whole minibatch and split along with it, so the accumulated
gradient of its parts is the gradient of the whole, under every reduction.
"""

import chex
import jax
import jax.numpy as jnp

from grpo_jax.precision import at_least_float32

__all__ = ["mean_of_sequence_means", "mean_of_sequence_sums", "mean_over_steps", "sum_over_horizon", "weighted_sum"]


def mean_over_steps(mask: jax.Array) -> jax.Array:
    """Weights of the mean over all valid steps of the batch: every step counts the same.

        w_it = m_it / sum(m)

    DAPO (https://arxiv.org/abs/2503.14476).
    """
    steps = mask.astype(float)
    return steps / jnp.maximum(jnp.sum(steps), 1.0)


def mean_of_sequence_means(mask: jax.Array) -> jax.Array:
    """Weights of the mean over sequences of their means: every sequence counts the same, a step of a short one more.

        w_it = m_it / (|y_i| * number of sequences)

    GRPO (https://arxiv.org/abs/2402.03300). Where length is reward it favours what ends early: see Dr. GRPO
    (https://arxiv.org/abs/2503.20783). Sequences without a valid step are not counted.
    """
    steps = mask.astype(float)
    return mean_of_sequence_sums(mask) / jnp.maximum(jnp.sum(steps, axis=0, keepdims=True), 1.0)


def mean_of_sequence_sums(mask: jax.Array) -> jax.Array:
    """Weights of the mean over sequences of their sums: the policy gradient of the episode.

        w_it = m_it / number of sequences

    LUSPO (https://arxiv.org/abs/2602.05261), whose step has the ratio of its sequence. Sequences without a valid step
    are not counted.
    """
    steps = mask.astype(float)
    return steps / jnp.maximum(jnp.sum(jnp.max(steps, axis=0)), 1.0)


def sum_over_horizon(mask: jax.Array, *, horizon: float | None = None) -> jax.Array:
    """Weights of the sum over steps divided by a constant: no weight depends on any length.

        w_it = m_it / (N horizon)

    Dr. GRPO (https://arxiv.org/abs/2503.20783). The horizon is in steps, by default `T`. `N` counts all sequences,
    those without a valid step too.
    """
    num_steps, num_rollouts = mask.shape
    return mask.astype(float) / (num_rollouts * (num_steps if horizon is None else horizon))


def weighted_sum(values: jax.Array, weights: jax.Array) -> jax.Array:
    """The sum of weighted values of any shape; values of weight 0 are ignored, even if they are not finite.

    The gradient into an ignored value is exactly 0. If that value came from a NaN, the chain rule beyond it may still
    give NaN: replace masked *inputs*, as `grpo_loss` does. Weights get no gradient.
    """
    return jnp.sum(weighted(values, weights))


def weighted(values: jax.Array, weights: jax.Array) -> jax.Array:
    """The terms of `weighted_sum`."""
    chex.assert_equal_shape([values, weights])
    values, weights = at_least_float32(values), at_least_float32(weights)
    return weights * jnp.where(weights == 0, 0.0, values)


@jax.custom_jvp
def sums(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The sums of arrays of one shape: on an accelerator in one pass over all of them, a kernel instead of many."""

    def in_one_pass(*arrays):
        zeros = tuple(jnp.zeros((), array.dtype) for array in arrays)
        return jax.lax.reduce(arrays, zeros, lambda x, y: tuple(map(jnp.add, x, y)), range(arrays[0].ndim))

    def stacked(*arrays):
        return tuple(jnp.sum(jnp.stack(arrays), axis=range(1, arrays[0].ndim + 1)))

    return jax.lax.platform_dependent(*arrays, cpu=stacked, default=in_one_pass)


@sums.defjvp
def _sums_jvp(primals, tangents):
    return sums(*primals), tuple(map(jnp.sum, tangents[0]))


def missing() -> float:
    """The value of a metric that an iteration does not have: NaN, or -inf while `jax_debug_nans` stops at every NaN."""
    return -jnp.inf if jax.config.jax_debug_nans else jnp.nan


def mean_or_missing(values: jax.Array, mask: jax.Array, axis: int | None = None) -> jax.Array:
    """The mean over the elements where the mask is true, of all or along an axis; `missing()` where there are none."""
    count = jnp.sum(mask, axis, dtype=float)
    return jnp.where(count > 0, jnp.sum(values, axis, where=mask) / jnp.maximum(count, 1), missing())

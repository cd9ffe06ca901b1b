"""Running statistics of observations and returns, updated once per rollout, and policies on normalised observations."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import broadcast_to_rank

from grpo_jax.policies.policy import OF_OBSERVATION, Policy
from grpo_jax.types import PyTree, Trajectory

EPS = 1e-8  # added to variances
CLIP = 10.0  # the largest magnitude of a normalised observation


class RunningStatistics(NamedTuple):
    """Elementwise mean and variance of all values of x so far, in float32.

    The mean is of x - origin, where origin is one value of x, so that float32 resolves its spread even if x
    is far from 0. The count is in rollouts, each as the fraction of it that is valid: a float32 count of steps would
    soon be too large to grow.
    """

    origin: jax.Array  # [...] fixed
    mean: jax.Array  # [...] of x - origin
    variance: jax.Array  # [...] population variance
    count: jax.Array  # [...] in rollouts


class Normalizer(NamedTuple):
    """The running statistics of observations and of discounted returns; None where normalisation is off.

    The observations' are a pytree like the observation, with None for an array that is not normalised.
    """

    observation: PyTree  # of RunningStatistics
    discounted_return: RunningStatistics | None


def initial_statistics(origin: jax.Array) -> RunningStatistics:
    """Statistics before the first rollout: mean at the origin (0 where that is not finite), variance 1, count 0."""
    origin = jnp.array(origin, jnp.float32)
    origin = jnp.where(jnp.isfinite(origin), origin, 0.0)
    return RunningStatistics(origin, jnp.zeros_like(origin), jnp.ones_like(origin), jnp.zeros_like(origin))


def merge(statistics: RunningStatistics, x: jax.Array, valid: jax.Array) -> RunningStatistics:
    """The statistics with one more rollout in them, by the parallel formula of Chan, Golub and LeVeque.

        mean <- mean + w d,  variance <- (1 - w) variance + w (new variance + (1 - w) d^2)

    where w is the new rollout's share of the count, and d the new mean minus the old one.

    Args:
      statistics: of rollouts of the same size.
      x: `[T, B, ...]`, any dtype.
      valid: `[T, B]` bool: the steps that count. Values that are not finite do not count. An element of the statistics
        stays as it is if none of its values counts or its variance overflows; the other elements still change.
    """
    x = x.astype(jnp.float32) - broadcast_to_rank(statistics.origin, x.ndim)
    mask = valid.reshape(valid.shape + (1,) * (x.ndim - valid.ndim)) & jnp.isfinite(x)
    num_valid = jnp.sum(mask, axis=(0, 1)).astype(jnp.float32)

    def mean(values):
        return jnp.sum(values, axis=(0, 1), where=mask) / jnp.maximum(num_valid, 1.0)

    new_mean = mean(x)
    new_variance = mean((x - broadcast_to_rank(new_mean, x.ndim)) ** 2)
    fraction = num_valid / valid.size
    count = statistics.count + fraction
    weight = fraction / jnp.where(count > 0, count, 1.0)
    difference = new_mean - statistics.mean
    merged = RunningStatistics(
        origin=statistics.origin,
        mean=statistics.mean + weight * difference,
        variance=(1 - weight) * statistics.variance + weight * (new_variance + (1 - weight) * difference**2),
        count=count,
    )
    usable = (num_valid > 0) & jnp.isfinite(new_variance)
    return jax.tree.map(lambda new, old: jnp.where(usable, new, old), merged, statistics)


def normalized(policy: Policy, statistics: PyTree) -> Policy:
    """The policy on normalised observations, clip((x - mean) / std, -10, 10), by the statistics of a `Normalizer`.

    An array with statistics is converted to float32, one without is unchanged. An element that never varied becomes 0.
    """
    if statistics is None:
        return policy

    def normalized_leaf(statistics, x):
        if statistics is None:
            return x
        origin, mean, variance, _ = (broadcast_to_rank(each, x.ndim) for each in statistics)
        centered = x.astype(jnp.float32) - origin - mean
        return jnp.clip(centered * jax.lax.rsqrt(variance + EPS), -CLIP, CLIP)

    def normalize(observation):
        return jax.tree.map(normalized_leaf, statistics, observation, is_leaf=_is_statistics)

    def on_normalized(function):
        return lambda params, observation, *rest: function(params, normalize(observation), *rest)

    return policy.map(on_normalized, OF_OBSERVATION)


def initial_normalizer(observation: PyTree, *, observations: bool, rewards: bool) -> Normalizer:
    """The normaliser before the first rollout.

    If an observation has several arrays, integers and booleans (tokens, masks) are not normalised.

    Args:
      observation: each leaf `[B, ...]`, of the reset states; the first finite one of each element is the origin of its
        statistics.
      observations, rewards: whether to normalise them.
    """
    is_one_array = len(jax.tree.leaves(observation)) == 1

    def statistics(x):
        if not (is_one_array or jnp.issubdtype(x.dtype, jnp.floating)):
            return None
        return initial_statistics(jnp.take_along_axis(x, jnp.argmax(jnp.isfinite(x), axis=0)[None], axis=0)[0])

    return Normalizer(
        observation=jax.tree.map(statistics, observation) if observations else None,
        discounted_return=initial_statistics(0.0) if rewards else None,
    )


def merge_rollout(normalizer: Normalizer, trajectory: Trajectory) -> Normalizer:
    """The normaliser with the valid steps of one more rollout in its statistics."""
    values = Normalizer(trajectory.observation, trajectory.discounted_return)

    def merged(statistics, x):
        return None if statistics is None else merge(statistics, x, trajectory.valid)

    return jax.tree.map(merged, normalizer, values, is_leaf=_is_statistics)


def _is_statistics(part):
    return part is None or isinstance(part, RunningStatistics)

"""Running statistics of observations and returns, merged once per rollout, and what is normalised by them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.policies import Policy
from grpo_jax.types import Trajectory

EPS = 1e-8  # added to variances


class Statistics(NamedTuple):
    """Elementwise mean and variance of all that was seen of x, in float32.

    They are of x - origin, where origin is one value that x had: what is resolved is then the spread of x, however far
    from 0 it lies. The count is in whole rollouts, of which a partly valid one is that part: rollouts, unlike steps,
    are too few for float32 to stop counting.
    """

    origin: jax.Array  # [...] fixed
    mean: jax.Array  # [...] of x - origin
    variance: jax.Array  # [...] population variance
    count: jax.Array  # [...] in rollouts


class Normalizer(NamedTuple):
    """What normalisation remembers between rollouts; None where it is off."""

    observation: Statistics | None
    discounted_return: Statistics | None


def initial_statistics(origin: jax.Array) -> Statistics:
    """Of nothing seen yet: mean at the origin, variance 1."""
    origin = jnp.array(origin, jnp.float32)
    return Statistics(origin, jnp.zeros_like(origin), jnp.ones_like(origin), jnp.zeros_like(origin))


def merge(statistics: Statistics, x: jax.Array, valid: jax.Array) -> Statistics:
    """The statistics of what was seen before and of one rollout, by Chan, Golub and LeVeque's parallel formula.

    With w the new rollout's share of the total, and d the difference of the means,
    mean <- mean + w d, variance <- (1 - w) variance + w (new variance + (1 - w) d^2).

    Args:
      statistics: of rollouts of the same size.
      x: `[T, B, ...]`, any dtype.
      valid: `[T, B]` bool: what counts. A value that is not finite does not, and where nothing does, or the variance
        overflows, nothing changes: element by element, so that one gone wrong leaves the others as they should be.
    """
    x = x.astype(jnp.float32) - statistics.origin
    mask = valid.reshape(valid.shape + (1,) * (x.ndim - valid.ndim)) & jnp.isfinite(x)
    num_valid = jnp.sum(mask, axis=(0, 1)).astype(jnp.float32)

    def mean(values):
        return jnp.sum(values, axis=(0, 1), where=mask) / num_valid

    new_mean = mean(x)
    new_variance = mean((x - new_mean) ** 2)
    share = num_valid / valid.size
    count = statistics.count + share
    weight = share / count
    difference = new_mean - statistics.mean
    merged = Statistics(
        origin=statistics.origin,
        mean=statistics.mean + weight * difference,
        variance=(1 - weight) * statistics.variance + weight * (new_variance + (1 - weight) * difference**2),
        count=count,
    )
    usable = jnp.isfinite(new_variance)
    return jax.tree.map(lambda new, old: jnp.where(usable, new, old), merged, statistics)


def normalized(policy: Policy, statistics: Statistics | None, clip: jax.Array) -> Policy:
    """The policy, seeing (x - mean) / std clipped to +-clip in place of observations x; itself, without statistics.

    Observations of any dtype are taken as float32. An element that never varied is seen as 0.
    """
    if statistics is None:
        return policy

    def normalize(observation):
        centered = observation.astype(jnp.float32) - statistics.origin - statistics.mean
        return jnp.clip(centered * jax.lax.rsqrt(statistics.variance + EPS), -clip, clip)

    def step(params, observation, *rest):
        return policy.step(params, normalize(observation), *rest)

    def sequence(params, observation, *rest):
        return policy.sequence(params, normalize(observation), *rest)

    def features(params, observation, *rest):
        return policy.features(params, normalize(observation), *rest)

    return policy._replace(step=step, sequence=sequence, features=policy.features and features)


def initial_normalizer(observation: jax.Array, *, observations: bool, rewards: bool) -> Normalizer:
    """Of nothing seen yet but where the environments start.

    Args:
      observation: `[B, ...]` of the reset states, whose first is taken for the origin of the statistics.
      observations, rewards: which to normalise.
    """
    return Normalizer(
        observation=initial_statistics(observation[0]) if observations else None,
        discounted_return=initial_statistics(0.0) if rewards else None,
    )


def merge_rollout(normalizer: Normalizer, trajectory: Trajectory) -> Normalizer:
    """What is remembered after a rollout; steps that are not valid do not count."""
    seen = Normalizer(trajectory.observation, trajectory.discounted_return)
    return Normalizer(
        *(
            None if statistics is None else merge(statistics, x, trajectory.valid)
            for statistics, x in zip(normalizer, seen, strict=True)
        )
    )


def scaled_rewards(normalizer: Normalizer, trajectory: Trajectory, clip: jax.Array) -> Trajectory:
    """The trajectory with rewards as they are learnt from: in standard deviations of the discounted return, clipped.

    Rewards are not centred, which would change what is best to do. With statistics that know the trajectory already,
    the first rewards of a sparse task are not divided by the deviation of nothing but zeros.
    """
    reward = trajectory.reward
    if normalizer.discounted_return is not None:
        reward = reward * jax.lax.rsqrt(normalizer.discounted_return.variance + EPS)
    return trajectory._replace(reward=jnp.clip(reward, -clip, clip))

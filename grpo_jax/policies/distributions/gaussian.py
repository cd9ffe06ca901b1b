"""Real actions `[..., D]` between bounds: a Gaussian in each dimension, clipped or squashed."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.errors import ConfigError
from grpo_jax.policies.distributions.distribution import Distribution

LOG_STD_RANGE = (-5.0, 2.0)
"""Log standard deviations are clamped to it: beyond, float32 no longer resolves an action, or exploration is blind."""

# The trapezoidal rule converges faster here than Gauss and Hermite's: to 3e-5 nats at a standard deviation of e, where
# theirs of as many nodes is at 1e-3, and to 0.013 of about 10 at the largest.
_NODES = np.linspace(-5.5, 5.5, 32, dtype=np.float32)
_WEIGHTS = np.exp(-(_NODES**2) / 2) / np.sum(np.exp(-(_NODES**2) / 2))


def diagonal_gaussian(low: tuple[float, ...], high: tuple[float, ...], free_std: bool = True) -> Distribution:
    """Independent Gaussians around the middle of the bounds, in units of half their width, clipped to them.

    The environment's action is a = clip(middle + half_width x, low, high) with x ~ N(mean, diag(std^2)), parameters
    (mean, log std) `[..., 2 D]`: a policy at its start covers the bounds, however far apart they lie. Actions as
    stored, and `mode`, are x. Densities are those of a before it is clipped,

        log p(a) = log N(x; mean, std) - sum log half_width.

    A dimension that is unbounded on a side has half_width 1, and as its middle the number within bounds nearest to 0.
    The log std is clamped to `LOG_STD_RANGE`, and has no gradient beyond.

    Args:
      low, high: bounds of each of D dimensions, which may be infinite.
      free_std: the log stds are free parameters; otherwise the network's output, as the means are.

    Raises:
      ConfigError: bounds of different length, or a lower bound that is not below the upper one.
    """
    low, high, bounded = _checked(low, high)
    first, last = np.where(bounded, (low, high), np.clip(0.0, low, high) + [[-1.0], [1.0]]).astype(np.float32)
    middle, half_width = last / 2 + first / 2, last / 2 - first / 2
    log_scale = float(np.sum(np.log(half_width)))
    return Distribution(
        num_parameters=2 * len(low),
        num_free=len(low) if free_std else 0,
        noise=lambda key, shape: jax.random.normal(key, (*shape, len(low))),
        from_noise=_from_noise,
        mode=_mean,
        log_prob=lambda parameters, x: _log_prob(parameters, x) - log_scale,
        entropy=lambda parameters: _entropy(parameters) + log_scale,
        kl=_kl,
        to_environment=lambda x: jnp.clip(middle + half_width * x, low, high),
    )


def squashed_gaussian(low: tuple[float, ...], high: tuple[float, ...], free_std: bool = True) -> Distribution:
    """Independent Gaussians squashed between the bounds (https://arxiv.org/abs/1801.01290, appendix C).

    The environment's action is a = middle + half_width tanh(u) with u ~ N(mean, diag(std^2)). Actions as stored, and
    `mode`, are u: the mode of u, which is where a is at the median. Densities are those of a,

        log p(a) = log N(u; mean, std) - sum log |da / du|,  log |da / du| = log(half_width) + log(1 - tanh(u)^2),

    finite, with finite gradients, where tanh(u) has long rounded to 1. The KL is exact, that of the Gaussians, as a
    bijection does not change it. The entropy, that of the Gaussian plus E[log |da / du|], is integrated numerically
    in each dimension, without sampling noise.

    Args:
      low, high: finite bounds of each of D dimensions.
      free_std: the log stds, clamped to `LOG_STD_RANGE`, are free parameters; otherwise the network's output.

    Raises:
      ConfigError: an infinite bound, bounds of different length, or a lower bound that is not below the upper one.
    """
    if not _checked(low, high)[-1].all():
        raise ConfigError(
            f"a squashed Gaussian needs finite bounds, and the actions have low={list(low)}, high={list(high)}; "
            "use action_distribution='gaussian'"
        )
    gaussian = diagonal_gaussian(low, high, free_std)

    def entropy(parameters):
        mean, log_std = _mean_and_log_std(parameters)
        nodes = mean[..., None] + jnp.exp(log_std)[..., None] * _NODES
        expected = jnp.sum(_log_tanh_slope(nodes) * _WEIGHTS, axis=-1)
        return gaussian.entropy(parameters) + jnp.sum(expected, axis=-1)

    return gaussian._replace(
        log_prob=lambda parameters, u: gaussian.log_prob(parameters, u) - jnp.sum(_log_tanh_slope(u), axis=-1),
        entropy=entropy,
        to_environment=lambda u: gaussian.to_environment(jnp.tanh(u)),
    )


def _checked(low, high) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The bounds, and in which dimensions they are finite and the distance between them is."""
    low, high = np.asarray(low, np.float32), np.asarray(high, np.float32)
    if low.ndim != 1 or low.size == 0 or low.shape != high.shape or not (low < high).all():
        raise ConfigError(
            f"low={low.tolist()} and high={high.tolist()} are no bounds of an action; give one number for each of its "
            "dimensions, low below high, such as low=(-1.0,), high=(1.0,)"
        )
    with np.errstate(over="ignore"):  # float32's largest number is often written for none
        return low, high, np.isfinite(high - low)


def _log_tanh_slope(u: jax.Array) -> jax.Array:
    """log(1 - tanh(u)^2), without the difference that rounds to 0."""
    return 2.0 * (math.log(2.0) - u - jax.nn.softplus(-2.0 * u))


def _mean(parameters: jax.Array) -> jax.Array:
    return jnp.split(parameters, 2, axis=-1)[0]


def _mean_and_log_std(parameters: jax.Array) -> tuple[jax.Array, jax.Array]:
    mean, log_std = jnp.split(parameters, 2, axis=-1)
    return mean, jnp.clip(log_std, *LOG_STD_RANGE)


def _from_noise(parameters: jax.Array, normal: jax.Array) -> jax.Array:
    mean, log_std = _mean_and_log_std(parameters)
    return mean + jnp.exp(log_std) * normal


def _log_prob(parameters: jax.Array, action: jax.Array) -> jax.Array:
    mean, log_std = _mean_and_log_std(parameters)
    standardized = (action - mean) * jnp.exp(-log_std)
    return -jnp.sum(0.5 * standardized**2 + log_std + 0.5 * math.log(2.0 * math.pi), axis=-1)


def _entropy(parameters: jax.Array) -> jax.Array:
    _, log_std = _mean_and_log_std(parameters)
    return jnp.sum(log_std + 0.5 * math.log(2.0 * math.pi * math.e), axis=-1)


def _kl(parameters: jax.Array, other: jax.Array) -> jax.Array:
    (mean, log_std), (other_mean, other_log_std) = map(_mean_and_log_std, (parameters, other))
    log_ratio = 2.0 * (log_std - other_log_std)
    distance = (mean - other_mean) * jnp.exp(-other_log_std)
    # expm1 keeps the small divergences of a trust region, which exp(x) - 1 - x would round away.
    return 0.5 * jnp.sum(jnp.expm1(log_ratio) - log_ratio + distance**2, axis=-1)

"""Real-valued actions `[..., D]` between bounds: a Gaussian in each dimension, clipped to them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import broadcast_to_rank

from grpo_jax.errors import ConfigError
from grpo_jax.policies.distributions.distribution import Distribution
from grpo_jax.precision import above_rounding

LOG_STD_RANGE = (-5.0, 2.0)
"""Log standard deviations are clamped to this range: below it float32 no longer resolves the differences between
actions, above it samples hardly depend on the mean."""


def diagonal_gaussian(low: tuple[float, ...], high: tuple[float, ...]) -> Distribution:
    """Independent Gaussians, scaled to the bounds and clipped to them.

        a = clip(middle + half_width x, low, high),  x ~ N(mean, diag(std^2)),  parameters (mean, log std) `[..., 2 D]`

    The scaling makes an initial policy cover the bounds, however far apart they are. A trajectory stores x, and `mode`
    returns x; the environment gets a. The density is of a before clipping:

        log p(a) = log N(x; mean, std) - sum log half_width

    A dimension without a lower or an upper bound has half_width 1, and its middle is the number within the bounds that
    is nearest to 0. The log stds are free parameters, clamped to `LOG_STD_RANGE`, outside of which their gradient is 0.

    Args:
      low, high: bounds of each of the D dimensions; they may be infinite.

    Raises:
      ConfigError: for bounds of different lengths, or a lower bound that is not below the upper one.
    """
    low, high, bounded = _checked(low, high)
    first, last = np.where(bounded, (low, high), np.clip(0.0, low, high) + [[-1.0], [1.0]]).astype(np.float32)
    middle, half_width = last / 2 + first / 2, last / 2 - first / 2
    log_scale = float(np.sum(np.log(half_width)))

    def to_environment(x):
        to_middle, scale, least, most = (broadcast_to_rank(each, x.ndim) for each in (middle, half_width, low, high))
        return jnp.clip(to_middle + scale * x, least, most)

    return Distribution(
        num_parameters=2 * len(low),
        num_free=len(low),
        noise=lambda key, shape: jax.random.normal(key, (*shape, len(low))),
        from_noise=_from_noise,
        mode=lambda parameters: _mean_and_log_std(parameters)[0],
        log_prob=lambda parameters, x: _log_prob(parameters, x) - log_scale,
        entropy=lambda parameters: _entropy(parameters) + log_scale,
        kl=_kl,
        to_environment=to_environment,
    )


def _checked(low, high) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The bounds as arrays `[D]`, and bool `[D]`: whether both bounds and their distance are finite."""
    low, high = np.asarray(low, np.float32), np.asarray(high, np.float32)
    if low.ndim != 1 or low.size == 0 or low.shape != high.shape or not (low < high).all():
        raise ConfigError(
            f"low={low.tolist()} and high={high.tolist()} are not valid bounds; give one number for each dimension of "
            "an action, low below high, such as low=(-1.0,), high=(1.0,)"
        )
    with np.errstate(over="ignore"):  # bounds of ±3.4e38, which often stand for "none"
        return low, high, np.isfinite(high - low)


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
    differs = jnp.any(above_rounding(parameters - other, parameters, other, least=1.0) != 0, axis=-1)
    # exp(x) - 1 - x would round the small divergences of a trust region to 0; expm1 keeps them.
    kl = 0.5 * jnp.sum(jnp.expm1(log_ratio) - log_ratio + distance**2, axis=-1)
    return jnp.where(differs, kl, 0.0)

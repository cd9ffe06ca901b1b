"""Families of action distributions: pure functions of their parameters, which are the output of a policy."""

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import broadcast_to_rank

from grpo_jax.environments.spaces import ActionSpace, Box, Discrete, MultiDiscrete
from grpo_jax.errors import ConfigError, function_name
from grpo_jax.importing import import_custom, is_custom
from grpo_jax.objectives import divergences
from grpo_jax.precision import above_rounding, at_least_float32, nan_where


class Distribution(NamedTuple):
    """A family of action distributions, as pure functions of its parameters.

    The parameters are one float32 array `[..., P]` in every family. Actions are `[...]`, or `[..., D]` if they have
    several dimensions; log-probabilities, entropies and divergences belong to the whole action, `[...]`.
    """

    num_parameters: int  # P
    # (key, shape) -> the random numbers that samples for parameters [*shape, P] need, each leaf [*shape, ...]. They
    # do not depend on the parameters, so many steps are drawn at once. A sampler that needs keys uses jax.random.split.
    noise: Callable
    from_noise: Callable  # (parameters, noise) -> action
    mode: Callable  # (parameters) -> the most probable action
    log_prob: Callable  # (parameters, action) -> [...]
    entropy: Callable  # (parameters) -> [...] in nats
    kl: Callable  # (parameters, other) -> [...] exact KL(parameters || other) in nats
    to_environment: Callable = lambda action: action  # (action) -> the action that the environment's `step` takes
    num_free: int = 0  # the last `num_free` parameters do not depend on the observation: a policy trains them directly

    def sample(self, parameters: jax.Array, key: jax.Array) -> jax.Array:
        """One action for each parameter vector."""
        return self.from_noise(parameters, self.noise(key, parameters.shape[:-1]))

    @property
    def num_outputs(self) -> int:
        """Number of parameters that a network computes from the observation: all but the free ones."""
        return self.num_parameters - self.num_free

    def init_free(self) -> dict[str, jax.Array]:
        """The free parameters as the entry "free" of a policy's parameters; no entry if there are none."""
        return {"free": jnp.zeros(self.num_free, jnp.float32)} if self.num_free else {}

    def join_free(self, outputs: jax.Array, params: Mapping[str, Any]) -> jax.Array:
        """A network's outputs `[..., num_outputs]` with the free parameters of `params` after them, `[..., P]`."""
        if not self.num_free:
            return outputs
        free = jnp.broadcast_to(params["free"], (*outputs.shape[:-1], self.num_free))
        return jnp.concatenate([outputs, free], axis=-1)


def make_distribution(space: ActionSpace, action_distribution: str | Callable = "auto") -> Distribution:
    """The family of distributions over an action space.

    Args:
      space: the action space.
      action_distribution: "auto" is categorical for Discrete and MultiDiscrete, and a Gaussian for Box. A custom one is
        a function `(space) -> Distribution`, or its path "package.module:name".

    Raises:
      ConfigError: for an unknown name or space.
    """
    if is_custom(action_distribution):
        family = import_custom(action_distribution, "action_distribution")
        distribution = family(space) if callable(family) else family
        if not isinstance(distribution, Distribution):
            raise ConfigError(
                f"action_distribution gives {distribution!r} for {space}, but must give a Distribution: write a "
                "function (space) -> Distribution"
            )
        if not 0 <= distribution.num_free <= distribution.num_parameters or distribution.num_parameters < 1:
            raise ConfigError(
                f"action_distribution={function_name(family)}: num_parameters={distribution.num_parameters} and "
                f"num_free={distribution.num_free}; use at least one parameter, and no more free ones than there are"
            )
        return distribution
    if action_distribution != "auto":
        raise ConfigError(
            f"unknown action_distribution {action_distribution!r}: use 'auto', a Gaussian for real actions, or "
            "'package.module:name' for a custom one"
        )
    match space:
        case Box(low, high):
            return diagonal_gaussian(low, high)
        case Discrete(num_actions):
            return categorical(num_actions)
        case MultiDiscrete(num_actions):
            return multi_categorical(num_actions)
    raise ConfigError(f"unknown action space {space}; use Discrete, MultiDiscrete or Box")


MOST_COLUMNS = 8  # actions that an accelerator takes one by one: reductions are kernels of their own on a GPU


def _inverse_cdf(logits: jax.Array, uniform: jax.Array) -> jax.Array:
    """Inverse transform sampling: logits `[..., A]` and uniform draws `[...]` to actions `[...]`.

    The first action of positive probability at which the sum of probabilities exceeds the draw.
    """
    logits = at_least_float32(logits)
    if logits.shape[-1] > MOST_COLUMNS:
        return _by_reductions(logits, uniform)
    return jax.lax.platform_dependent(logits, uniform, cpu=_by_reductions, default=_by_columns)


def _by_columns(logits: jax.Array, uniform: jax.Array) -> jax.Array:
    columns = jnp.unstack(logits, axis=-1)
    most = functools.reduce(jnp.maximum, columns)
    *sums, total = itertools.accumulate(jnp.exp(column - most) for column in columns)
    # Sums in order never fall, so the first that exceeds the draw exceeds the one before; the total always does.
    return sum(((each <= uniform * total).astype(jnp.int32) for each in sums), jnp.zeros_like(uniform, jnp.int32))


def _by_reductions(logits: jax.Array, uniform: jax.Array) -> jax.Array:
    probability, action = jax.nn.softmax(logits), jnp.arange(logits.shape[-1], dtype=jnp.int32)
    cumulative, possible = jnp.cumsum(probability, axis=-1), probability > 0
    # The total may round to less than 1. Sums in parallel may fall and rise where probabilities are 0, so the total may
    # also exceed the sum at the last possible action, which is then the result.
    draw = uniform * cumulative[..., -1]
    passed = jnp.where(possible & (cumulative > draw[..., None]), action, action[-1])
    return jnp.minimum(jnp.min(passed, axis=-1), jnp.max(jnp.where(possible, action, 0), axis=-1))


def _log_prob(logits: jax.Array, action: jax.Array) -> jax.Array:
    # A masked sum instead of a gather: the gradient of a gather is a scatter, which is slow for few actions.
    num_actions = logits.shape[-1]
    chosen = action[..., None] == broadcast_to_rank(jnp.arange(num_actions), logits.ndim)
    nan_outside = nan_where((action < 0) | (action >= num_actions))
    return jnp.sum(jax.nn.log_softmax(logits), axis=-1, where=chosen) + nan_outside


def _entropy(logits: jax.Array) -> jax.Array:
    log_probs = jax.nn.log_softmax(logits)
    # An action of probability 0 adds 0 to the value and to the gradient; 0 * -inf would be NaN.
    return -jnp.sum(jnp.exp(log_probs) * jnp.where(jnp.isneginf(log_probs), 0.0, log_probs), axis=-1)


def _kl(logits: jax.Array, other: jax.Array) -> jax.Array:
    return divergences.exact(jax.nn.log_softmax(logits), jax.nn.log_softmax(other))


def categorical(num_actions: int) -> Distribution:
    """One of `num_actions` actions, from logits `[..., num_actions]`; a logit of -inf gives probability 0.

    The log-probability of an index outside 0 to `num_actions - 1` is NaN.
    """
    return Distribution(
        num_parameters=num_actions,
        noise=jax.random.uniform,
        from_noise=_inverse_cdf,
        mode=lambda logits: jnp.argmax(logits, axis=-1),
        log_prob=_log_prob,
        entropy=_entropy,
        kl=_kl,
    )


def multi_categorical(num_actions: tuple[int, ...]) -> Distribution:
    """One action in each of D independent dimensions: actions `[..., D]`.

        log p(a) = sum_d log p_d(a_d)

    Entropies and divergences are sums over the dimensions, too.

    Args:
      num_actions: number of actions in each dimension. The parameters are the logits of all dimensions, concatenated.
    """
    ends = np.cumsum(num_actions)

    def split(logits):
        return jnp.split(logits, ends[:-1], axis=-1)

    def from_noise(logits, uniform):
        return jnp.stack([_inverse_cdf(part, uniform[..., d]) for d, part in enumerate(split(logits))], axis=-1)

    def log_prob(logits, action):
        return sum(_log_prob(part, action[..., d]) for d, part in enumerate(split(logits)))

    return Distribution(
        num_parameters=int(ends[-1]),
        noise=lambda key, shape: jax.random.uniform(key, (*shape, len(num_actions))),
        from_noise=from_noise,
        mode=lambda logits: jnp.stack([jnp.argmax(part, axis=-1) for part in split(logits)], axis=-1),
        log_prob=log_prob,
        entropy=lambda logits: sum(map(_entropy, split(logits))),
        kl=lambda logits, other: sum(map(_kl, split(logits), split(other))),
    )


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
    low, high = np.asarray(low, np.float32), np.asarray(high, np.float32)
    if low.ndim != 1 or low.size == 0 or low.shape != high.shape or not (low < high).all():
        raise ConfigError(
            f"low={low.tolist()} and high={high.tolist()} are not valid bounds; give one number for each dimension of "
            "an action, low below high, such as low=(-1.0,), high=(1.0,)"
        )
    with np.errstate(over="ignore"):  # bounds of ±3.4e38, which often stand for "none"
        bounded = np.isfinite(high - low)
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
        from_noise=_gaussian_action,
        mode=lambda parameters: _mean_and_log_std(parameters)[0],
        log_prob=lambda parameters, x: _gaussian_log_prob(parameters, x) - log_scale,
        entropy=lambda parameters: _gaussian_entropy(parameters) + log_scale,
        kl=_gaussian_kl,
        to_environment=to_environment,
    )


def _mean_and_log_std(parameters: jax.Array) -> tuple[jax.Array, jax.Array]:
    mean, log_std = jnp.split(parameters, 2, axis=-1)
    return mean, jnp.clip(log_std, *LOG_STD_RANGE)


def _gaussian_action(parameters: jax.Array, normal: jax.Array) -> jax.Array:
    mean, log_std = _mean_and_log_std(parameters)
    return mean + jnp.exp(log_std) * normal


def _gaussian_log_prob(parameters: jax.Array, action: jax.Array) -> jax.Array:
    mean, log_std = _mean_and_log_std(parameters)
    standardized = (action - mean) * jnp.exp(-log_std)
    return -jnp.sum(0.5 * standardized**2 + log_std + 0.5 * math.log(2.0 * math.pi), axis=-1)


def _gaussian_entropy(parameters: jax.Array) -> jax.Array:
    _, log_std = _mean_and_log_std(parameters)
    return jnp.sum(log_std + 0.5 * math.log(2.0 * math.pi * math.e), axis=-1)


def _gaussian_kl(parameters: jax.Array, other: jax.Array) -> jax.Array:
    (mean, log_std), (other_mean, other_log_std) = map(_mean_and_log_std, (parameters, other))
    log_ratio = 2.0 * (log_std - other_log_std)
    distance = (mean - other_mean) * jnp.exp(-other_log_std)
    differs = jnp.any(above_rounding(parameters - other, parameters, other, least=1.0) != 0, axis=-1)
    # exp(x) - 1 - x would round the small divergences of a trust region to 0; expm1 keeps them.
    kl = 0.5 * jnp.sum(jnp.expm1(log_ratio) - log_ratio + distance**2, axis=-1)
    return jnp.where(differs, kl, 0.0)

"""Discrete actions in one or several dimensions, from logits. A logit of -inf gives its action probability 0."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import broadcast_to_rank

from grpo_jax.objectives import divergences
from grpo_jax.policies.distributions.distribution import Distribution
from grpo_jax.precision import at_least_float32, nan_where


def _inverse_cdf(logits: jax.Array, uniform: jax.Array) -> jax.Array:
    """Inverse transform sampling: logits `[..., A]` and uniform draws `[...]` to actions `[...]`.

    The first action of positive probability at which the sum of probabilities exceeds the draw.
    """
    probability, action = jax.nn.softmax(at_least_float32(logits)), jnp.arange(logits.shape[-1])
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
        num_free=0,
        noise=jax.random.uniform,
        from_noise=_inverse_cdf,
        mode=lambda logits: jnp.argmax(logits, axis=-1),
        log_prob=_log_prob,
        entropy=_entropy,
        kl=_kl,
        to_environment=lambda action: action,
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
        num_free=0,
        noise=lambda key, shape: jax.random.uniform(key, (*shape, len(num_actions))),
        from_noise=from_noise,
        mode=lambda logits: jnp.stack([jnp.argmax(part, axis=-1) for part in split(logits)], axis=-1),
        log_prob=log_prob,
        entropy=lambda logits: sum(map(_entropy, split(logits))),
        kl=lambda logits, other: sum(map(_kl, split(logits), split(other))),
        to_environment=lambda action: action,
    )

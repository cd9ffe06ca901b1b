"""Action distributions, each a value of `Distribution`: pure functions of the network's output.

`parameters` are what the policy network returns for a batch, any leading shape. Nothing here reduces over it.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax import divergences
from grpo_jax.errors import ConfigError
from grpo_jax.spaces import ActionSpace, Discrete


class Distribution(NamedTuple):
    """A family of action distributions: what a policy's output means."""

    num_parameters: int  # P, the length of the vector of parameters
    num_free: int  # of these, the last ones do not depend on the observation: a policy learns them as such
    sample: Callable  # (parameters [..., P], key) -> action [...]
    mode: Callable  # (parameters) -> action, the most probable one
    log_prob: Callable  # (parameters, action) -> [...]
    entropy: Callable  # (parameters) -> [...] in nats
    kl: Callable  # (parameters, other) -> [...] exact KL(parameters || other) in nats
    to_environment: Callable  # (action) -> what the environment's step takes


def _sample(logits: jax.Array, key: jax.Array) -> jax.Array:
    """Inverse of the cumulative distribution at one uniform draw an action; an action of probability 0 never occurs."""
    cumulative = jnp.cumsum(jax.nn.softmax(logits), axis=-1)
    # Scaled by the total, so that rounding in the sum cannot select an impossible last action.
    draw = jax.random.uniform(key, logits.shape[:-1]) * cumulative[..., -1]
    return jnp.sum(cumulative[..., :-1] <= draw[..., None], axis=-1)


def _mode(logits: jax.Array) -> jax.Array:
    return jnp.argmax(logits, axis=-1)


def _log_prob(logits: jax.Array, action: jax.Array) -> jax.Array:
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], axis=-1)[..., 0]


def _entropy(logits: jax.Array) -> jax.Array:
    log_probs = jax.nn.log_softmax(logits)
    # An impossible action adds 0, not 0 * -inf, to the value and to the gradient.
    return -jnp.sum(jnp.exp(log_probs) * jnp.where(jnp.isneginf(log_probs), 0.0, log_probs), axis=-1)


def _kl(logits: jax.Array, other: jax.Array) -> jax.Array:
    return divergences.exact(jax.nn.log_softmax(logits), jax.nn.log_softmax(other))


def categorical(num_actions: int) -> Distribution:
    """Discrete actions from logits `[..., num_actions]`; a logit of -inf masks an action out."""
    return Distribution(
        num_parameters=num_actions,
        num_free=0,
        sample=_sample,
        mode=_mode,
        log_prob=_log_prob,
        entropy=_entropy,
        kl=_kl,
        to_environment=lambda action: action,
    )


def make_distribution(space: ActionSpace) -> Distribution:
    """The family that suits an action space."""
    match space:
        case Discrete(num_actions):
            return categorical(num_actions)
    raise ConfigError(f"no policy exists for actions in {space}")

"""The interface of every family of action distributions."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Distribution(NamedTuple):
    """A family of action distributions, as pure functions of its parameters.

    The parameters are one float32 array `[..., P]` in every family. Actions are `[...]`, or `[..., D]` if they have
    several dimensions; log-probabilities, entropies and divergences belong to the whole action, `[...]`.
    """

    num_parameters: int  # P
    num_free: int  # the last `num_free` parameters do not depend on the observation: a policy trains them directly
    # (key, shape) -> the random numbers that samples for parameters [*shape, P] need, each leaf [*shape, ...]. They
    # do not depend on the parameters, so many steps are drawn at once. A sampler that needs keys uses jax.random.split.
    noise: Callable
    from_noise: Callable  # (parameters, noise) -> action
    mode: Callable  # (parameters) -> the most probable action
    log_prob: Callable  # (parameters, action) -> [...]
    entropy: Callable  # (parameters) -> [...] in nats
    kl: Callable  # (parameters, other) -> [...] exact KL(parameters || other) in nats
    to_environment: Callable  # (action) -> the action that the environment's `step` takes
    initial_free: float = 0.0  # initial value of the free parameters

    def sample(self, parameters: jax.Array, key: jax.Array) -> jax.Array:
        """One action for each parameter vector."""
        return self.from_noise(parameters, self.noise(key, parameters.shape[:-1]))

    @property
    def num_outputs(self) -> int:
        """Number of parameters that a network computes from the observation: all but the free ones."""
        return self.num_parameters - self.num_free

    def init_free(self) -> dict[str, jax.Array]:
        """The free parameters as the entry "free" of a policy's parameters; no entry if there are none."""
        if not self.num_free:
            return {}
        return {"free": jnp.full(self.num_free, self.initial_free, jnp.float32)}

    def join_free(self, outputs: jax.Array, params: Mapping[str, Any]) -> jax.Array:
        """A network's outputs `[..., num_outputs]` with the free parameters of `params` after them, `[..., P]`."""
        if not self.num_free:
            return outputs
        free = jnp.broadcast_to(params["free"], (*outputs.shape[:-1], self.num_free))
        return jnp.concatenate([outputs, free], axis=-1)

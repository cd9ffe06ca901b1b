"""The one interface of every family of action distributions."""

from collections.abc import Callable
from typing import NamedTuple

import jax


class Distribution(NamedTuple):
    """A family of action distributions: what a policy's output means.

    Parameters are one float32 array `[..., P]`, whatever the family. Actions are `[...]`, or `[..., D]` where an
    action has dimensions; probabilities, entropies and divergences are of the whole action, `[...]`.
    """

    num_parameters: int  # P, the length of the vector of parameters
    num_free: int  # of these, the last ones do not depend on the observation: a policy learns them as such
    # (key, shape) -> what makes samples of parameters [*shape, P] random, each array of it [*shape, ...]. It does not
    # depend on the parameters; a sampler that cannot do without keys has jax.random.split here.
    noise: Callable
    from_noise: Callable  # (parameters, noise) -> action
    mode: Callable  # (parameters) -> action, the most probable one; of a squashed one the median
    log_prob: Callable  # (parameters, action) -> [...]
    entropy: Callable  # (parameters) -> [...] in nats
    kl: Callable  # (parameters, other) -> [...] exact KL(parameters || other) in nats
    to_environment: Callable  # (action) -> what the environment's step takes
    initial_free: float = 0.0  # where the free parameters start

    def sample(self, parameters: jax.Array, key: jax.Array) -> jax.Array:
        """An action for each vector of parameters."""
        return self.from_noise(parameters, self.noise(key, parameters.shape[:-1]))

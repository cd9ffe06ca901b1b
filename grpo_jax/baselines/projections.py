"""Random features: fixed functions of an observation, whose weighted sums express what those of its elements cannot."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import broadcast_to_rank

from grpo_jax.baselines.lstd import is_usable
from grpo_jax.objectives.whitening import centred, std
from grpo_jax.precision import at_least_float32, exact_sum

LARGEST = 10.0
"""Standard deviations from the mean beyond which random features no longer tell observations apart."""


class Scaling(NamedTuple):
    """The mean and the standard deviation of each element of an observation; 1 for one that does not vary."""

    mean: jax.Array  # [E]
    deviation: jax.Array  # [E]


def scaling_of(x: jax.Array, mask: jax.Array) -> Scaling:
    """The scaling by observations `[..., E]` where the mask `[...]` is true; those that are not finite do not count."""
    x, axes = at_least_float32(x), tuple(range(mask.ndim))
    counts = (mask.astype(bool) & is_usable(x))[..., None]
    mean = jnp.sum(x, axis=axes, where=counts) / jnp.maximum(jnp.sum(counts, axis=axes), 1)
    # Not from that mean: its rounding would be the deviation of an element that does not vary.
    deviation = std(centred(x, counts, axes), counts, axes, ddof=0).reshape(mean.shape)
    return Scaling(mean, jnp.where(deviation > 0, deviation, 1.0))


def random_features(x: jax.Array, scaling: Scaling, number: int) -> jax.Array:
    """Rectified projections of observations to random directions, the same in every call.

        f_k(x) = max(0, u_k . (x - mean) / deviation + c_k),  u_k uniform on the unit sphere,  c_k uniform in [-3, 3]

    Their weighted sums are piecewise linear functions of the observation. Rahimi and Recht, Weighted sums of random
    kitchen sinks (NeurIPS 2008).

    Args:
      x: `[..., E]` observations, any dtype.
      scaling: of the E elements, such as by `scaling_of`; scaled ones are clipped to +-`LARGEST`.
      number: of features, K. Static.

    Returns:
      `[..., K]`, NaN where an observation has a NaN.
    """
    generator = np.random.default_rng(0)
    directions = generator.standard_normal((x.shape[-1], number))
    directions /= np.linalg.norm(directions, axis=0)
    offsets = generator.uniform(-3, 3, number)
    mean, deviation, offsets = (broadcast_to_rank(each, x.ndim) for each in (*scaling, offsets))
    x = jnp.clip((at_least_float32(x) - mean) / deviation, -LARGEST, LARGEST)
    return jax.nn.relu(exact_sum("...e,ek->...k", x, directions.astype(x.dtype)) + offsets.astype(x.dtype))

"""Dense layers: the torso for flat observations."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from grpo_jax.networks.dense import Dense
from grpo_jax.networks.initializers import orthogonal


def mlp(x: jax.Array, *, hidden_sizes: Sequence[int], activation: Callable, scale: float) -> jax.Array:
    """Dense layers with orthogonal weights of gain `scale` and zero biases, made in the flax module that calls this.

    Args:
      x: `[N, ...]`, of any dtype; each sample is flattened and taken as float32.
      hidden_sizes: widths; none gives the flat sample itself.
      activation: after each layer.
      scale: gain of the initial weights.

    Returns:
      `[N, features]` float32.
    """
    x = x.reshape(x.shape[0], -1).astype(jnp.float32)
    for size in hidden_sizes:
        x = activation(Dense(size, kernel_init=orthogonal(scale))(x))
    return x

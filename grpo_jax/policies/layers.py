"""Fully connected layers and their initial weights."""

from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier

from grpo_jax.policies.dense import Dense, is_narrow


def orthogonal(scale: float) -> Callable:
    """Orthogonal matrices, uniformly distributed, times `scale` (https://arxiv.org/abs/1312.6120).

    The Newton-Schulz iteration computes the polar factor of a Gaussian matrix, from matrix products alone. The usual QR
    decomposition leaves an accelerator idle, and under `vmap` it can deadlock on a CPU with few cores (jaxlib 0.10: two
    batched factorisations each hold a thread of the pool and wait for the other's).

    Returns:
      `init(key, shape, dtype)` for kernels `[inputs, outputs]`, whose columns (or rows, if there are fewer of them) are
      orthogonal vectors of length `scale`.
    """

    def init(key, shape, dtype=jnp.float32):
        tall = jax.random.normal(key, (max(shape), min(shape)), dtype)

        def closer(_, x):
            gram = jnp.matmul(x.T, x, precision="highest")
            return jnp.matmul(x, 1.5 * jnp.eye(min(shape), dtype=dtype) - 0.5 * gram, precision="highest")

        # A small singular value grows by half in each step until it converges to 1. 60 steps suffice from 1e-9.
        factor = jax.lax.fori_loop(0, 60, closer, tall / jnp.linalg.norm(tall))
        return scale * (factor if shape[0] >= shape[1] else factor.T)

    return init


def side_by_side(init: Callable, number: int) -> Callable:
    """An initialiser of `number` kernels in one array, `[inputs, number * outputs]`; `init` draws each separately."""

    def init_all(key, shape, dtype=jnp.float32):
        keys = jax.random.split(key, number)
        return jnp.concatenate([init(key, (shape[0], shape[1] // number), dtype) for key in keys], axis=1)

    return init_all


def mlp(
    x: jax.Array,
    *,
    hidden_sizes: Sequence[int],
    activation: Callable,
    scale: float,
    layer_norm: bool = False,
    fused: bool = False,
) -> jax.Array:
    """Dense layers with orthogonal weights and zero biases, created inside the flax module that calls this function.

    Args:
      x: `[N, ...]`, of any dtype; each sample is flattened and converted to float32.
      hidden_sizes: widths of the layers; an empty sequence returns the flat samples.
      activation: applied after each layer.
      scale: gain of the initial weights.
      layer_norm: normalise the features of each layer before the activation (https://arxiv.org/abs/1607.06450).
      fused: the layers are laid out for an accelerator (`fused_dense`).

    Returns:
      `[N, features]` float32; with `fused` and without layers, integers stay integers.
    """
    x = x.reshape(x.shape[0], -1)
    if not fused or jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(jnp.float32)
    for size in hidden_sizes:
        was_narrow = is_narrow(x)
        x = Dense(size, kernel_init=orthogonal(scale), fused=fused)(x)
        x = activation(nn.LayerNorm()(x) if layer_norm else x)
        if fused and was_narrow:
            # Otherwise XLA stores the sums and repeats the activation, which it does not fuse into the gradient's sums.
            x = optimization_barrier(x)
    return x

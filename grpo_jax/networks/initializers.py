"""Initial weights."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def orthogonal(scale: float) -> Callable:
    """Orthogonal matrices, uniformly distributed, times `scale` (https://arxiv.org/abs/1312.6120).

    The polar factor of a Gaussian matrix by Newton and Schulz's iteration: matrix products alone. The usual QR
    decomposition under `vmap` can deadlock on a CPU with few cores (jaxlib 0.10: each of two batched factorisations
    holds a thread of the pool while it waits for the other's), and leaves an accelerator idle.

    Returns:
      `init(key, shape, dtype)` for kernels `[inputs, outputs]`; the longer side's vectors are orthonormal.
    """

    def init(key, shape, dtype=jnp.float32):
        tall = jax.random.normal(key, (max(shape), min(shape)), dtype)

        def closer(_, x):
            gram = jnp.matmul(x.T, x, precision="highest")
            return jnp.matmul(x, 1.5 * jnp.eye(min(shape), dtype=dtype) - 0.5 * gram, precision="highest")

        # Singular values below 1 grow by half in each step until they settle at 1: 60 steps lift those of 1e-9.
        factor = jax.lax.fori_loop(0, 60, closer, tall / jnp.linalg.norm(tall))
        return scale * (factor if shape[0] >= shape[1] else factor.T)

    return init


def side_by_side(init: Callable, number: int) -> Callable:
    """`number` kernels in one, `[inputs, number * outputs]`, each drawn by `init` on its own."""

    def init_all(key, shape, dtype=jnp.float32):
        keys = jax.random.split(key, number)
        return jnp.concatenate([init(key, (shape[0], shape[1] // number), dtype) for key in keys], axis=1)

    return init_all

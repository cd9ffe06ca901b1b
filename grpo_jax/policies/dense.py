"""Dense layers: initial weights, and gradients that are fast on CPUs and accelerators."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.lax import broadcast_to_rank, optimization_barrier


@jax.custom_vjp
def product(inputs: jax.Array, kernel: jax.Array) -> jax.Array:
    """`inputs @ kernel` with a gradient that is fast on CPUs too, `[..., inputs] @ [inputs, outputs]`.

    The gradient of the kernel contracts the first axis of both operands, for which XLA's CPU backend has no fast
    routine. There it is an ordinary product with the smaller operand transposed, which saves a tenth of the whole train
    step. The rule is for reverse mode only: `jax.jvp` raises an error.
    """
    return inputs @ kernel


def _forward(inputs, kernel):
    return inputs @ kernel, (inputs, kernel)


def _backward(residuals, gradient):
    inputs, kernel = residuals
    flat = (x.reshape(-1, x.shape[-1]) for x in (inputs, gradient))
    into_kernel = jax.lax.platform_dependent(*flat, cpu=_transposed_first, default=lambda x, y: x.T @ y)
    return gradient @ kernel.T, into_kernel


def _transposed_first(inputs: jax.Array, gradient: jax.Array) -> jax.Array:
    """`inputs.T @ gradient`. The barriers stop XLA from merging the transpose into the product again."""
    if gradient.shape[1] < inputs.shape[1]:
        return optimization_barrier(optimization_barrier(gradient.T) @ inputs).T
    return optimization_barrier(inputs.T) @ gradient


product.defvjp(_forward, _backward)


class Adapter(NamedTuple):
    """A low-rank addition to a kernel, `scale * lora_a @ lora_b` (LoRA, https://arxiv.org/abs/2106.09685)."""

    rank: int
    scale: float


adapter_init = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
"""Initialiser of an adapter's first matrix: uniform within 1 / sqrt(inputs). The second one begins at 0."""


class Dense(nn.Module):
    """A dense layer, `x @ kernel + bias`, with the parameters of `flax.linen.Dense`."""

    features: int
    use_bias: bool = True
    dtype: Any = None  # of the computation; None: the inputs' and parameters'
    kernel_init: Callable = dataclasses.field(default_factory=nn.initializers.lecun_normal)
    param_dtype: Any = jnp.float32  # of kernel and bias
    adapter: Adapter | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., inputs]` to `[..., features]`."""
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features), self.param_dtype)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), self.param_dtype) if self.use_bias else None
        adapter = []
        if self.adapter is not None:
            shape = x.shape[-1], self.adapter.rank
            adapter.append(self.param("lora_a", adapter_init, shape, jnp.float32))
            adapter.append(self.param("lora_b", nn.initializers.zeros, (shape[1], self.features), jnp.float32))
        x, kernel, bias, *adapter = nn.dtypes.promote_dtype(x, kernel, bias, *adapter, dtype=self.dtype)
        y = product(x, kernel)
        if adapter:
            y += self.adapter.scale * product(product(x, adapter[0]), adapter[1])
        return y if bias is None else y + broadcast_to_rank(bias, y.ndim)


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
        return scale * _orthogonal(key, tuple(shape), dtype)

    return init


@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)  # each shape is traced once
def _orthogonal(key: jax.Array, shape: tuple[int, int], dtype: Any) -> jax.Array:
    tall = jax.random.normal(key, (max(shape), min(shape)), dtype)

    def closer(_, x):
        gram = jnp.matmul(x.T, x, precision="highest")
        return jnp.matmul(x, 1.5 * jnp.eye(min(shape), dtype=dtype) - 0.5 * gram, precision="highest")

    # A small singular value grows by half in each step until it converges to 1. 60 steps suffice from 1e-9.
    factor = jax.lax.fori_loop(0, 60, closer, tall / jnp.linalg.norm(tall))
    return factor if shape[0] >= shape[1] else factor.T


def side_by_side(init: Callable, number: int) -> Callable:
    """An initialiser of `number` kernels in one array, `[inputs, number * outputs]`; `init` draws each separately."""

    def init_all(key, shape, dtype=jnp.float32):
        keys = jax.random.split(key, number)
        return jnp.concatenate([init(key, (shape[0], shape[1] // number), dtype) for key in keys], axis=1)

    return init_all


HIDDEN_GAIN = math.sqrt(2)
"""Gain of the initial weights of hidden layers."""


def mlp(x: jax.Array, *, hidden_sizes: Sequence[int], activation: Callable, layer_norm: bool = False) -> jax.Array:
    """Dense layers with orthogonal weights and zero biases, created inside the flax module that calls this function.

    Args:
      x: `[N, ...]`, of any dtype; each sample is flattened and converted to float32.
      hidden_sizes: widths of the layers; an empty sequence returns the flat samples.
      activation: applied after each layer.
      layer_norm: normalise the features of each layer before the activation (https://arxiv.org/abs/1607.06450).

    Returns:
      `[N, features]` float32.
    """
    x = x.reshape(x.shape[0], -1).astype(jnp.float32)
    for size in hidden_sizes:
        x = Dense(size, kernel_init=orthogonal(HIDDEN_GAIN))(x)
        x = activation(nn.LayerNorm()(x) if layer_norm else x)
    return x

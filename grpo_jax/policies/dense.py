"""Dense layers and a convolution: initial weights, and gradients that are fast on CPUs and accelerators."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.lax import broadcast_to_rank, optimization_barrier

from grpo_jax.observations import channels_first


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
            rank, scale = self.adapter
            adapter.append(self.param("lora_a", adapter_init, (x.shape[-1], rank), jnp.float32))
            adapter.append(self.param("lora_b", nn.initializers.zeros, (rank, self.features), jnp.float32))
        x, kernel, bias, *adapter = nn.dtypes.promote_dtype(x, kernel, bias, *adapter, dtype=self.dtype)
        y = product(x, kernel)
        if adapter:
            y += scale * product(product(x, adapter[0]), adapter[1])
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


HIDDEN_GAIN = math.sqrt(2)  # of the initial weights of hidden layers


def convolution(x: jax.Array, channels: int, activation: Callable) -> jax.Array:
    """A 3×3 convolution with orthogonal weights, created inside the flax module that calls this function.

    The stride is 1 for images of up to 16 pixels a side, as in MinAtar's paper (https://arxiv.org/abs/1903.03176). It
    grows to 3 for larger images, to limit the cost of the dense layers. Every pixel is in some patch.

    Args:
      x: `[N, height, width, ...]`, whose axes after the width are flattened into channels, or images with their
        channels first (`observations.channels_first`). Pixels of type uint8 are divided by 255; other types are
        converted to float32 unscaled.
      channels: number of output channels.
      activation: applied to the result.

    Returns:
      `[N, height', width', channels]` float32.
    """
    x = jnp.moveaxis(x, 1, -1) if channels_first(x.shape[1:]) else x
    x = patches(x.reshape(*x.shape[:3], -1), stride=min(3, -(-max(x.shape[1:3]) // 16)))
    x = x.astype(jnp.float32) / 255.0 if x.dtype == jnp.uint8 else x.astype(jnp.float32)
    return activation(Dense(channels, kernel_init=orthogonal(HIDDEN_GAIN), name="Conv_0")(x))


def patches(x: jax.Array, stride: int) -> jax.Array:
    """The 3×3 patches of images `[N, height, width, channels]`, each as `9 * channels` features, row by row.

    Their product with a kernel is a convolution. Under `vmap` over the kernels XLA turns an ordinary convolution into a
    grouped one, which is slow on a CPU. Zeros are added at the end of a side where the stride would leave out pixels.
    """
    steps = [-(-(side - 3) // stride) for side in x.shape[1:3]]
    padding = [(0, stride * step + 3 - side) for step, side in zip(steps, x.shape[1:3], strict=True)]
    x = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    rows, columns = (stride * step + 1 for step in steps)
    shifted = [x[:, i : i + rows : stride, j : j + columns : stride] for i in range(3) for j in range(3)]
    return jnp.concatenate(shifted, axis=-1)

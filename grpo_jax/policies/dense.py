"""Dense layers: initial weights, and gradients that are fast on CPUs and accelerators."""

import dataclasses
import functools
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
"""Of the first matrix of an adapter: uniform within 1 / sqrt(inputs). The second one begins at 0."""


class Dense(nn.Module):
    """A dense layer, `x @ kernel + bias`, with the parameters of `flax.linen.Dense`."""

    features: int
    use_bias: bool = True
    dtype: Any = None  # of the computation; None: the inputs' and parameters'
    kernel_init: Callable = dataclasses.field(default_factory=nn.initializers.lecun_normal)
    param_dtype: Any = jnp.float32  # of kernel and bias
    adapter: Adapter | None = None
    fused: bool = False  # the product is `fused_dense`; for inputs [N, features] and with a bias

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., inputs]` to `[..., features]`."""
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features), self.param_dtype)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), self.param_dtype) if self.use_bias else None
        if self.fused:
            return fused_dense(x, kernel, bias)
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


NARROW = 8
"""The most inputs or outputs of a layer that `fused_dense` computes one by one."""


@jax.custom_vjp
def fused_dense(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    """`x @ kernel + bias`, laid out so that an accelerator moves few bytes.

    A matrix product reads its operands from memory and writes its result to it, also where one side is narrow, such as
    the observations of CartPole and the heads of a policy. XLA fuses a sum of products of columns into the operations
    around it. The gradient of a bias is one more column, of ones. Integers are converted in each product, which reads
    a quarter of the bytes of float32.

    Args:
      x: `[N, inputs]`, of any dtype.
      kernel: `[inputs, outputs]`.
      bias: `[outputs]`.

    Returns:
      `[N, outputs]`.
    """
    return _narrow_product(x, kernel) + bias[None]


def _fused_backward(residuals, gradient):
    x, kernel = residuals
    into_x = _narrow_product(gradient, kernel.T) if jnp.issubdtype(x.dtype, jnp.floating) else None
    x = _as_float(x)
    if is_narrow(x):
        both = _sum_of_outer_products(jnp.concatenate([x, jnp.ones_like(x[:, :1])], axis=1), gradient)
        return into_x, both[:-1], both[-1]
    into_kernel = _sum_of_outer_products(gradient, x).T if is_narrow(gradient) else x.T @ gradient
    return into_x, into_kernel, jnp.sum(gradient, axis=0)


fused_dense.defvjp(lambda x, kernel, bias: (fused_dense(x, kernel, bias), (x, kernel)), _fused_backward)


def is_narrow(x: jax.Array) -> bool:
    """Whether `[N, columns]` has at most `NARROW` columns."""
    return x.shape[1] <= NARROW


def _narrow_product(x, kernel):
    """`x @ kernel`."""
    x = _as_float(x)
    return sum(x[:, i : i + 1] * kernel[i][None] for i in range(x.shape[1])) if is_narrow(x) else x @ kernel


def _as_float(x):
    """Integers as float32. If only one product reads a conversion, XLA fuses it, so this makes a separate one."""
    return x if jnp.issubdtype(x.dtype, jnp.floating) else optimization_barrier(x).astype(jnp.float32)


def _sum_of_outer_products(narrow, x):
    """`narrow.T @ x`, `[N, k]` and `[N, m]` to `[k, m]`, in one pass over `x`.

    XLA must fuse the `[N, k, m]` products with their sum. TPU: write it as a broadcast. GPU: write it as a stack. The
    other form is materialised in memory, on a GPU from a million rows on (jax 0.10.2).
    """
    return jax.lax.platform_dependent(narrow, x, tpu=_sum_of_broadcast, default=_sum_of_stack)


def _sum_of_broadcast(narrow, x):
    return jnp.sum(narrow[:, :, None] * x[:, None, :], axis=0)


def _sum_of_stack(narrow, x):
    return jnp.sum(jnp.stack([narrow[:, i : i + 1] * x for i in range(narrow.shape[1])], axis=1), axis=0)


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

"""Layers: dense, convolutional and recurrent, and how their weights begin."""

import functools
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier


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


def dot_general(inputs: jax.Array, kernel: jax.Array, dimension_numbers, precision=None, **_) -> jax.Array:
    """`inputs @ kernel`, in the signature that `flax.linen.Dense` calls.

    The gradient of the kernel contracts the first axis of both operands, for which XLA's CPU backend has no fast
    kernel. There it is computed by one ordinary product, of the smaller operand's transpose: a tenth of the whole
    train step. That is a rule for reverse mode, so on a CPU `jax.jvp` does not pass through it.
    """
    assert dimension_numbers == (((inputs.ndim - 1,), (0,)), ((), ()))
    if jax.default_backend() == "cpu":
        return _product(inputs, kernel)
    return jax.lax.dot_general(inputs, kernel, dimension_numbers, precision)


@jax.custom_vjp
def _product(inputs, kernel):
    return inputs @ kernel


def _forward(inputs, kernel):
    return inputs @ kernel, (inputs, kernel)


def _backward(residuals, gradient):
    inputs, kernel = residuals
    return gradient @ kernel.T, _kernel_gradient(*(x.reshape(-1, x.shape[-1]) for x in (inputs, gradient)))


def _kernel_gradient(inputs: jax.Array, gradient: jax.Array) -> jax.Array:
    """`inputs.T @ gradient`. The barriers keep XLA from folding a transpose back into the product."""
    if gradient.shape[1] < inputs.shape[1]:
        return optimization_barrier(optimization_barrier(gradient.T) @ inputs).T
    return optimization_barrier(inputs.T) @ gradient


_product.defvjp(_forward, _backward)


Dense = functools.partial(nn.Dense, dot_general=dot_general)
"""flax's dense layer with this product."""


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


KERNEL = 3
"""Height and width of the convolution's kernel, and the smallest image it takes."""


def is_image(shape: tuple[int, ...]) -> bool:
    """Whether observations of this shape have a height and a width that a kernel fits into."""
    return len(shape) >= 2 and min(shape[:2]) >= KERNEL


def convolution(x: jax.Array, *, channels: int, activation: Callable, scale: float) -> jax.Array:
    """One 3×3 convolution with orthogonal weights of gain `scale`, made in the flax module that calls this.

    The stride is 1 on images of up to 16 pixels a side, as in MinAtar's paper (https://arxiv.org/abs/1903.03176), and
    grows to 3 on larger ones, which bounds what the dense layers cost; every pixel is in some patch.

    Args:
      x: `[N, height, width, ...]`, of any dtype; what follows the width are channels, one if nothing does.
      channels: of the output.
      activation: after the convolution.
      scale: gain of the initial weights.

    Returns:
      `[N, height', width', channels]` float32.
    """
    x = x.reshape(*x.shape[:3], -1)
    stride = min(KERNEL, -(-max(x.shape[1:3]) // 16))
    x = patches(x, stride).astype(jnp.float32)
    return activation(Dense(channels, kernel_init=orthogonal(scale), name="Conv_0")(x))


def patches(x: jax.Array, stride: int) -> jax.Array:
    """The 3×3 neighbourhoods of an image: a convolution is a matrix product with them.

    Written so because a convolution under `vmap` over its kernels is a grouped one, which is slow on a CPU.

    Args:
      x: `[N, height, width, channels]`; padded with zeros at the end where a stride would leave pixels out.
      stride: between neighbourhoods.

    Returns:
      `[N, 1 + ceil((height - 3) / stride), 1 + ceil((width - 3) / stride), 9 * channels]`, row by row.
    """
    steps = [-(-(side - KERNEL) // stride) for side in x.shape[1:3]]
    padding = [stride * step + KERNEL - side for step, side in zip(steps, x.shape[1:3], strict=True)]
    x = jnp.pad(x, ((0, 0), (0, padding[0]), (0, padding[1]), (0, 0)))
    rows, columns = (stride * step + 1 for step in steps)
    shifted = [x[:, i : i + rows : stride, j : j + columns : stride] for i in range(KERNEL) for j in range(KERNEL)]
    return jnp.concatenate(shifted, axis=-1)


class GRU(nn.Module):
    """Gated recurrent units (https://arxiv.org/abs/1406.1078), the reset gate after the product, as cuDNN has it.

        r = σ(W_r x + U_r h),  z = σ(W_z x + U_z h),  n = tanh(W_n x + r (U_n h + b)),  h' = (1 - z) n + z h

    Every W and U starts orthogonal, every bias at 0.
    """

    size: int

    @nn.compact
    def __call__(self, x: jax.Array, carry: jax.Array, is_first: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Runs over a sequence.

        Args:
          x: `[S, N, features]`.
          carry: `[N, size]`, before the first step.
          is_first: `[S, N]` bool: the carry is 0 before this step, whatever was before.

        Returns:
          The carry after each step, `[S, N, size]`, and after the last.
        """
        gates = side_by_side(orthogonal(1.0), 3)
        # One matrix product for the inputs of all steps: only what depends on the carry is left for the scan.
        inputs = Dense(3 * self.size, kernel_init=gates, name="input")(x)
        kernel = self.param("recurrent_kernel", gates, (self.size, 3 * self.size), jnp.float32)
        bias = self.param("recurrent_bias", nn.initializers.zeros, (self.size,), jnp.float32)

        def cell(h, step):
            x, start = step
            h = jnp.where(start[:, None], 0.0, h)
            x_gates, x_new = jnp.split(x, [2 * self.size], axis=-1)
            h_gates, h_new = jnp.split(dot_general(h, kernel, (((1,), (0,)), ((), ()))), [2 * self.size], axis=-1)
            r, z = jnp.split(nn.sigmoid(x_gates + h_gates), 2, axis=-1)
            h = (1.0 - z) * jnp.tanh(x_new + r * (h_new + bias)) + z * h
            return h, h

        carry, outputs = jax.lax.scan(cell, carry, (inputs, is_first))
        return outputs, carry

"""Fully connected, convolutional and recurrent layers, and their initial weights."""

from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier

from grpo_jax.policies.dense import Dense, is_narrow, product


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
    x: jax.Array, *, hidden_sizes: Sequence[int], activation: Callable, scale: float, fused: bool = False
) -> jax.Array:
    """Dense layers with orthogonal weights and zero biases, created inside the flax module that calls this function.

    Args:
      x: `[N, ...]`, of any dtype; each sample is flattened and converted to float32.
      hidden_sizes: widths of the layers; an empty sequence returns the flat samples.
      activation: applied after each layer.
      scale: gain of the initial weights.
      fused: the layers are laid out for an accelerator (`fused_dense`).

    Returns:
      `[N, features]` float32; with `fused` and without layers, integers stay integers.
    """
    x = x.reshape(x.shape[0], -1)
    if not fused or jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(jnp.float32)
    for size in hidden_sizes:
        was_narrow = is_narrow(x)
        x = activation(Dense(size, kernel_init=orthogonal(scale), fused=fused)(x))
        if fused and was_narrow:
            # Otherwise XLA stores the sums and repeats the activation, which it does not fuse into the gradient's sums.
            x = optimization_barrier(x)
    return x


KERNEL = 3
"""Height and width of the convolution's kernel, and the smallest height and width of an image."""


def is_image(shape: tuple[int, ...]) -> bool:
    """Whether observations of this shape have a height and a width that the convolution's kernel fits into."""
    return len(shape) >= 2 and min(shape[:2]) >= KERNEL


def convolution(x: jax.Array, *, channels: int, activation: Callable, scale: float) -> jax.Array:
    """One 3×3 convolution with orthogonal weights, created inside the flax module that calls this function.

    The stride is 1 for images of up to 16 pixels a side, as in MinAtar's paper (https://arxiv.org/abs/1903.03176). It
    grows to 3 for larger images, to limit the cost of the dense layers. Every pixel is in some patch.

    Args:
      x: `[N, height, width, ...]`, of any dtype; all axes after the width are flattened into channels.
      channels: number of output channels.
      activation: applied after the convolution.
      scale: gain of the initial weights.

    Returns:
      `[N, height', width', channels]` float32.
    """
    x = x.reshape(*x.shape[:3], -1)
    stride = min(KERNEL, -(-max(x.shape[1:3]) // 16))
    x = patches(x, stride).astype(jnp.float32)
    return activation(Dense(channels, kernel_init=orthogonal(scale), name="Conv_0")(x))


def patches(x: jax.Array, stride: int) -> jax.Array:
    """The 3×3 patches of an image; their product with a kernel is a convolution.

    Under `vmap` over the kernels XLA turns an ordinary convolution into a grouped one, which is slow on a CPU.

    Args:
      x: `[N, height, width, channels]`; padded with zeros at the end where the stride would leave out pixels.
      stride: distance between patches.

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
    """Gated recurrent units (https://arxiv.org/abs/1406.1078), with the reset gate after the product, as in cuDNN.

        r = σ(W_r x + U_r h),  z = σ(W_z x + U_z h),  n = tanh(W_n x + r (U_n h + b)),  h' = (1 - z) n + z h

    Initially every W and U is orthogonal and every bias is 0.
    """

    size: int

    @nn.compact
    def __call__(self, x: jax.Array, carry: jax.Array, is_first: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Processes a sequence.

        Args:
          x: `[S, N, features]`.
          carry: `[N, size]`, before the first step.
          is_first: `[S, N]` bool: reset the carry to 0 before this step.

        Returns:
          The carry after each step, `[S, N, size]`, and after the last one, `[N, size]`.
        """
        gates = side_by_side(orthogonal(1.0), 3)
        # One matrix product for the inputs of all steps; the scan computes only what depends on the carry.
        inputs = Dense(3 * self.size, kernel_init=gates, name="input")(x)
        kernel = self.param("recurrent_kernel", gates, (self.size, 3 * self.size), jnp.float32)
        bias = self.param("recurrent_bias", nn.initializers.zeros, (self.size,), jnp.float32)

        def cell(h, step):
            x, first = step
            h = jnp.where(first[:, None], 0.0, h)
            x_gates, x_new = jnp.split(x, [2 * self.size], axis=-1)
            h_gates, h_new = jnp.split(product(h, kernel), [2 * self.size], axis=-1)
            r, z = jnp.split(nn.sigmoid(x_gates + h_gates), 2, axis=-1)
            h = (1.0 - z) * jnp.tanh(x_new + r * (h_new + bias)) + z * h
            return h, h

        carry, outputs = jax.lax.scan(cell, carry, (inputs, is_first))
        return outputs, carry

"""A convolution before the dense layers: the torso for images."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from grpo_jax.networks.dense import Dense
from grpo_jax.networks.initializers import orthogonal

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

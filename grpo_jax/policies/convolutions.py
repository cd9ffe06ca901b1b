"""Convolutional layers for images, created inside the flax module that calls these functions.

Each takes `[N, height, width, ...]`, whose axes after the width are flattened into channels, or images with their
channels first (`observations.channels_first`), and returns `[N, height', width', channels]` float32. Pixels of type
uint8 are divided by 255; other types are converted to float32 unscaled. `channels` is the number of output channels, in
a network of several layers the unit of their numbers. Initial weights are orthogonal.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from grpo_jax.observations import channels_first
from grpo_jax.policies.dense import HIDDEN_GAIN, Dense, orthogonal


def convolution(x: jax.Array, channels: int, activation: Callable) -> jax.Array:
    """One 3×3 convolution, followed by the activation.

    The stride is 1 for images of up to 16 pixels a side, as in MinAtar's paper (https://arxiv.org/abs/1903.03176). It
    grows to 3 for larger images, to limit the cost of the dense layers. Every pixel is in some patch.
    """
    x = _channels_last(x)
    stride = min(3, -(-max(x.shape[1:3]) // 16))
    x = _as_float(patches(x, stride))
    return activation(Dense(channels, kernel_init=orthogonal(HIDDEN_GAIN), name="Conv_0")(x))


def nature_cnn(x: jax.Array, channels: int, activation: Callable) -> jax.Array:
    """Three convolutions, 8×8 with stride 4, 4×4 with stride 2, and 3×3 (https://doi.org/10.1038/nature14236).

    They have 2, 4 and 4 times `channels`, 16 in the paper, and an activation after each. The paper's images are 84×84,
    which become 7×7, followed by a dense layer of 512 units, all with relu.
    """
    x = _channels_last(x)
    for i, (multiple, kernel, stride) in enumerate(((2, 8, 4), (4, 4, 2), (4, 3, 1))):
        x = _as_float(patches(x, stride, kernel))
        x = activation(Dense(multiple * channels, kernel_init=orthogonal(HIDDEN_GAIN), name=f"Conv_{i}")(x))
    return x


def is_image(shape: tuple[int, ...], least: int = 3) -> bool:
    """Whether observations of this shape have a height and a width of at least this many pixels."""
    first = channels_first(shape)
    return len(shape) >= 2 and min(shape[first : 2 + first]) >= least


def _channels_last(x: jax.Array) -> jax.Array:
    """`[N, height, width, channels]`."""
    x = jnp.moveaxis(x, 1, -1) if channels_first(x.shape[1:]) else x
    return x.reshape(*x.shape[:3], -1)


def patches(x: jax.Array, stride: int, kernel: int = 3) -> jax.Array:
    """The square patches of an image; their product with a kernel is a convolution.

    Under `vmap` over the kernels XLA turns an ordinary convolution into a grouped one, which is slow on a CPU.

    Args:
      x: `[N, height, width, channels]`; padded with zeros at the end where the stride would leave out pixels.
      stride: distance between patches.
      kernel: height and width of a patch.

    Returns:
      `[N, 1 + ceil((height - kernel) / stride), 1 + ceil((width - kernel) / stride), kernel² * channels]`, row by row.
    """
    steps = [-(-(side - kernel) // stride) for side in x.shape[1:3]]
    padding = [stride * step + kernel - side for step, side in zip(steps, x.shape[1:3], strict=True)]
    x = jnp.pad(x, ((0, 0), (0, padding[0]), (0, padding[1]), (0, 0)))
    rows, columns = (stride * step + 1 for step in steps)
    shifted = [x[:, i : i + rows : stride, j : j + columns : stride] for i in range(kernel) for j in range(kernel)]
    return jnp.concatenate(shifted, axis=-1)


def _as_float(x: jax.Array) -> jax.Array:
    """float32; pixels of type uint8 divided by 255."""
    return x.astype(jnp.float32) / 255.0 if x.dtype == jnp.uint8 else x.astype(jnp.float32)

"""Encodings of integers that name categories, as the built-in networks take raw numbers."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def one_hot_layers(cells: jax.Array, sizes: Sequence[int]) -> jax.Array:
    """Cells `[..., L]` of L integers each as int8 `[..., sum(sizes)]`: a one-hot vector for each integer, side by side.

    A dense layer or a convolution on them equals one on the sum of learnt embeddings of the L integers. An integer
    outside its range becomes zeros.
    """
    layers = [jax.nn.one_hot(cells[..., i], size, dtype=jnp.int8) for i, size in enumerate(sizes)]
    return jnp.concatenate(layers, axis=-1)

"""Layers against plain products and convolutions, and their initial weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.policies.convolutions import patches
from grpo_jax.policies.dense import orthogonal, product, side_by_side


def curve(product, kernel, inputs):
    return jnp.sum(jnp.sin(product(inputs, kernel)))


def test_gradients_of_the_dense_product():
    both = jax.jit(lambda *arguments: [jax.grad(curve, (1, 2))(f, *arguments) for f in (product, jnp.matmul)])
    for shape, outputs in (((7, 5), 3), ((7, 3), 5), ((2, 4, 5), 5), ((6, 5), 1)):
        inputs = jax.random.normal(jax.random.key(0), shape)
        kernel = jax.random.normal(jax.random.key(1), (shape[-1], outputs))
        for ours, plain in zip(*both(kernel, inputs), strict=True):
            np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


def test_many_kernels_at_once_and_second_derivatives():
    inputs = jax.random.normal(jax.random.key(0), (6, 4))
    kernels = jax.random.normal(jax.random.key(1), (3, 4, 2))

    def gradient_norm(product, kernel):
        return jnp.sum(jax.grad(curve, 1)(product, kernel, inputs) ** 2)

    differentiate = jax.vmap(jax.grad(gradient_norm, 1), (None, 0))
    ours, plain = jax.jit(lambda kernels: [differentiate(f, kernels) for f in (product, jnp.matmul)])(kernels)
    np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape, stride", [((10, 10, 4), 1), ((17, 20, 3), 2)])
def test_the_convolution_is_a_convolution(shape, stride):
    images = jax.random.randint(jax.random.key(0), (2, *shape), 0, 3).astype(jnp.uint8)
    kernel = jax.random.normal(jax.random.key(1), (3, 3, shape[2], 5))
    spare = [(0, -(side - 3) % stride) for side in shape[:2]]

    @jax.jit
    def convolve(images):
        real, layout = images.astype(jnp.float32), ("NHWC", "HWIO", "NHWC")
        expected = jax.lax.conv_general_dilated(real, kernel, (stride, stride), spare, dimension_numbers=layout)
        sums = jax.grad(lambda x: patches(x, stride).sum())(real)
        return patches(images, stride) @ kernel.reshape(-1, 5), expected, sums

    ours, expected, sums = convolve(images)
    np.testing.assert_allclose(ours, expected, atol=1e-4)
    assert (sums >= 1).all(), "every pixel is in some patch"


@pytest.mark.parametrize("shape", [(8, 8), (16, 2)])
def test_initial_kernels_are_orthogonal_and_uniform(shape):
    kernels = jax.jit(jax.vmap(lambda key: orthogonal(2.0)(key, shape)))(jax.random.split(jax.random.key(0), 500))
    kernels = np.asarray(kernels, np.float64)
    short = kernels if shape[0] >= shape[1] else kernels.transpose(0, 2, 1)
    gram = np.einsum("nij,nik->njk", short, short)
    np.testing.assert_allclose(gram, np.broadcast_to(4 * np.eye(min(shape)), gram.shape), atol=2e-5)
    # Uniform: every entry has mean 0 and variance scale² / longest side.
    entries = kernels.reshape(500, -1)
    assert np.max(np.abs(entries.mean(0))) < 5 * 2 / np.sqrt(500 * max(shape))
    np.testing.assert_allclose(np.mean(entries**2), 4 / max(shape), rtol=1e-5)


def test_kernels_side_by_side_are_drawn_apart():
    kernel = side_by_side(orthogonal(2.0), 3)(jax.random.key(0), (4, 15))
    assert kernel.shape == (4, 15)
    for gate in jnp.split(kernel, 3, axis=1):
        np.testing.assert_allclose(gate @ gate.T, 4 * np.eye(4), atol=4e-5)
    assert not np.array_equal(kernel[:, :5], kernel[:, 5:10])

"""The dense layer's product and its gradient are those of a plain product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.policies.layers import dot_general


def product(inputs, kernel):
    return dot_general(inputs, kernel, (((inputs.ndim - 1,), (0,)), ((), ())))


def curve(product, kernel, inputs):
    return jnp.sum(jnp.sin(product(inputs, kernel)))


@pytest.mark.parametrize("shape, outputs", [((7, 5), 3), ((7, 3), 5), ((2, 4, 5), 5), ((6, 5), 1)])
def test_gradients(shape, outputs):
    inputs = jax.random.normal(jax.random.key(0), shape)
    kernel = jax.random.normal(jax.random.key(1), (shape[-1], outputs))
    for argument in (1, 2):
        ours, plain = (jax.grad(curve, argument)(f, kernel, inputs) for f in (product, jnp.matmul))
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


def test_many_kernels_at_once_and_second_derivatives():
    inputs = jax.random.normal(jax.random.key(0), (6, 4))
    kernels = jax.random.normal(jax.random.key(1), (3, 4, 2))

    def gradient_norm(product, kernel):
        return jnp.sum(jax.grad(curve, 1)(product, kernel, inputs) ** 2)

    ours, plain = (jax.vmap(jax.grad(gradient_norm, 1), (None, 0))(f, kernels) for f in (product, jnp.matmul))
    np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)

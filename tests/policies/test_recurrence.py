"""The gradient of a recurrence, against the one that JAX derives from a plain loop over the steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.policies.recurrence import recurrence
from grpo_jax.policies.recurrent import _gru, _lstm

NUM_STEPS, NUM_SEQUENCES, SIZE = 7, 3, 4


def plain(gates, inputs, state, is_first, kernel, bias):
    states = []
    for x, first in zip(inputs, is_first, strict=True):
        state = tuple(jnp.where(first[:, None], 0.0, part) for part in state)
        state = gates(state[-1] @ kernel, x, state, bias)
        states.append(state)
    return jax.tree.map(lambda *steps: jnp.stack(steps), *states), state


def make_arguments(gates):
    keys = jax.random.split(jax.random.key(0), 6)
    number, state_size = (3, 1) if gates is _gru else (4, 2)
    inputs = jax.random.normal(keys[0], (NUM_STEPS, NUM_SEQUENCES, number * SIZE))
    state = tuple(jax.random.normal(key, (NUM_SEQUENCES, SIZE)) for key in keys[1 : 1 + state_size])
    is_first = jnp.zeros((NUM_STEPS, NUM_SEQUENCES), bool).at[0, 1].set(True).at[3, 0].set(True).at[6, 2].set(True)
    kernel = jax.random.normal(keys[4], (SIZE, number * SIZE))
    return inputs, state, is_first, kernel, jax.random.normal(keys[5], (SIZE,)) if gates is _gru else ()


@pytest.mark.parametrize("gates", [_gru, _lstm])
@pytest.mark.parametrize("steps_per_loop", [1, 3])
def test_states_and_gradients_are_those_of_a_plain_loop(gates, steps_per_loop):
    inputs, state, is_first, kernel, bias = make_arguments(gates)

    def total(run, inputs, state, kernel, bias):
        states, last = run(inputs, state, is_first, kernel, bias)
        weighed = sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(states))
        return weighed + sum(jnp.sum(jnp.cos(2.0 * leaf)) for leaf in last), (states, last)

    def differentiate(run):
        gradient = jax.value_and_grad(lambda *arguments: total(run, *arguments), argnums=(0, 1, 2, 3), has_aux=True)
        return jax.jit(gradient)(inputs, state, kernel, bias)

    ours = differentiate(lambda *arguments: recurrence(gates, steps_per_loop, *arguments))
    oracle = differentiate(lambda *arguments: plain(gates, *arguments))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), ours, oracle)


def test_gradients_are_mapped_over_parameters():
    inputs, state, is_first, kernel, bias = make_arguments(_gru)
    kernels = jnp.stack([kernel, 0.5 * kernel])

    def gradient(kernel):
        return jax.grad(lambda kernel: jnp.sum(recurrence(_gru, 1, inputs, state, is_first, kernel, bias)[0][0]))(
            kernel
        )

    apart = jnp.stack([gradient(kernel) for kernel in kernels])
    np.testing.assert_allclose(jax.vmap(gradient)(kernels), apart, rtol=2e-5, atol=2e-6)

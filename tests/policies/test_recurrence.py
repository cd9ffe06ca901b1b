"""The gradient of a recurrence, against the one that JAX derives from a plain loop over the steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.policies.recurrent import gru_cell, lstm_cell, recurrence

NUM_STEPS, NUM_SEQUENCES, SIZE = 7, 3, 4


def plain(cell, inputs, state, is_first, kernel, bias):
    states = []
    for x, first in zip(inputs, is_first, strict=True):
        state = tuple(jnp.where(first[:, None], 0.0, part) for part in state)
        state = cell(state[-1] @ kernel, x, state, bias)
        states.append(state)
    return jax.tree.map(lambda *steps: jnp.stack(steps), *states)


def make_arguments(cell):
    keys = jax.random.split(jax.random.key(0), 6)
    number, state_size = (3, 1) if cell is gru_cell else (4, 2)
    inputs = jax.random.normal(keys[0], (NUM_STEPS, NUM_SEQUENCES, number * SIZE))
    state = tuple(jax.random.normal(key, (NUM_SEQUENCES, SIZE)) for key in keys[1 : 1 + state_size])
    is_first = jnp.zeros((NUM_STEPS, NUM_SEQUENCES), bool).at[0, 1].set(True).at[3, 0].set(True).at[6, 2].set(True)
    kernel = jax.random.normal(keys[4], (SIZE, number * SIZE))
    return inputs, state, is_first, kernel, jax.random.normal(keys[5], (SIZE,)) if cell is gru_cell else ()


@pytest.mark.parametrize("cell", [gru_cell, lstm_cell])
def test_states_and_gradients_are_those_of_a_plain_loop(cell):
    inputs, state, is_first, kernel, bias = make_arguments(cell)

    def differentiate(run):
        def total(inputs, state, kernel, bias):
            states = run(inputs, state, is_first, kernel, bias)
            return sum(jnp.sum(jnp.sin(leaf)) + jnp.sum(jnp.cos(2.0 * leaf[-1])) for leaf in states), states

        return jax.jit(jax.value_and_grad(total, (0, 1, 2, 3), has_aux=True))(inputs, state, kernel, bias)

    oracle = differentiate(functools.partial(plain, cell))
    for steps_per_loop in (1, 3, NUM_STEPS + 2):
        ours = differentiate(functools.partial(recurrence, cell, steps_per_loop))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), ours, oracle)

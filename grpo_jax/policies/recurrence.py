"""A recurrence over time, whose gradient leaves only what depends on the next step inside a loop."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from grpo_jax.policies.dense import product
from grpo_jax.types import PyTree


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def recurrence(
    cell: Callable,
    steps_per_loop: int,
    inputs: jax.Array,
    state: tuple[jax.Array, ...],
    is_first: jax.Array,
    kernel: jax.Array,
    bias: PyTree,
) -> tuple[jax.Array, ...]:
    """All states of `s_t = cell(h_{t-1} @ kernel, x_t, s_{t-1}, bias)`, where `h` is the last array of a state.

    A loop backwards over the steps computes the gradient of each state and nothing else. The gradients of inputs,
    kernel and bias come after it, for all steps at once. `h @ kernel` is stored, and what `cell` computes from it is
    computed again. That saves an accelerator most launches. The rule is for reverse mode only: `jax.jvp` raises an
    error.

    Args:
      cell: a function of `h @ kernel`, `[..., G]`, of inputs, `[..., G]`, of a state and of the bias, elementwise over
        the leading axes, which are `[N]` or `[S, N]`. It must not close over traced arrays; these belong into `bias`.
      steps_per_loop: steps in one iteration of the compiled loops (unrolling).
      inputs: `[S, N, G]`; at least one step.
      state: before the first step, a tuple of arrays `[N, size]`.
      is_first: `[S, N]` bool; the state is 0 before such a step.
      kernel: `[size, G]`.
      bias: arrays for `cell`; () for none.

    Returns:
      The state after each step, each array `[S, N, size]`.
    """
    return _forward(cell, steps_per_loop, inputs, state, is_first, kernel, bias)[0]


def _forward(cell, steps_per_loop, inputs, state, is_first, kernel, bias):
    def step(state, inputs):
        x, next_is_first = inputs
        h_product = product(state[-1], kernel)
        new_state = cell(h_product, x, state, bias)
        # The reset before the next step comes here, where XLA fuses it with the cell.
        return _reset(next_is_first, new_state), (new_state, h_product)

    next_is_first = jnp.concatenate([is_first[1:], jnp.zeros_like(is_first[:1])])
    start = _reset(is_first[0], state)
    _, (states, products) = jax.lax.scan(step, start, (inputs, next_is_first), unroll=steps_per_loop)
    return states, (inputs, state, is_first, kernel, bias, states, products)


def _backward(cell, steps_per_loop, residuals, grad_outputs):
    inputs, state, is_first, kernel, bias, states, products = residuals
    previous = jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest[:-1]]), state, states)
    previous = _reset(is_first, previous)
    _, pull_product = jax.vjp(product, previous[-1], kernel)

    def step(grad_state, xs):
        h_product, x, previous, is_first, grad_output = xs
        grad_state = jax.tree.map(jnp.add, grad_state, grad_output)
        _, pull = jax.vjp(lambda h_product, previous: cell(h_product, x, previous, bias), h_product, previous)
        grad_product, (*others, grad_h) = pull(grad_state)
        return _reset(is_first, (*others, grad_h + grad_product @ kernel.T)), grad_state

    xs = products, inputs, previous, is_first, grad_outputs
    end = jax.tree.map(jnp.zeros_like, state)
    grad_state, grad_states = jax.lax.scan(step, end, xs, reverse=True, unroll=steps_per_loop)
    _, pull = jax.vjp(lambda products, inputs, bias: cell(products, inputs, previous, bias), products, inputs, bias)
    grad_products, grad_inputs, grad_bias = pull(grad_states)
    return grad_inputs, grad_state, None, pull_product(grad_products)[1], grad_bias


recurrence.defvjp(_forward, _backward)


def _reset(is_first: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return jax.tree.map(lambda leaf: jnp.where(is_first[..., None], 0.0, leaf), state)

"""A recurrence over time, whose gradient leaves only what depends on the next step inside a loop."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from grpo_jax.policies.dense import product


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def recurrence(
    gates: Callable,
    steps_per_loop: int,
    inputs: jax.Array,
    state: tuple[jax.Array, ...],
    is_first: jax.Array,
    kernel: jax.Array,
    bias: jax.Array,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """All states of `s_t = gates(h_{t-1} @ kernel, x_t, s_{t-1}, bias)`, where `h` is the last array of a state.

    A loop backwards over the steps computes the gradient of each state and nothing else: all `h @ kernel` are one
    product before it, the gradients of inputs, kernel and bias come after it, and `gates` is computed again instead of
    stored. On an accelerator that is a third of the launches that JAX's own gradient needs. The rule is for reverse
    mode only: `jax.jvp` raises an error.

    Args:
      gates: elementwise, for one step `[N, ...]` and for many `[S, N, ...]`.
      steps_per_loop: steps in one iteration of the compiled loops (unrolling).
      inputs: `[S, N, G]`.
      state: before the first step, each array `[N, size]`.
      is_first: `[S, N]` bool; the state is 0 before such a step.
      kernel: `[size, G]`.
      bias: for `gates`.

    Returns:
      The state after each step, each array `[S, N, size]`, and the one after the last step.
    """
    return _forward(gates, steps_per_loop, inputs, state, is_first, kernel, bias)[0]


def _forward(gates, steps_per_loop, inputs, state, is_first, kernel, bias):
    def step(before, now):
        x, ends = now
        after = gates(product(before[-1], kernel), x, before, bias)
        return _reset(ends, after), after

    ends = jnp.concatenate([is_first[1:], jnp.zeros_like(is_first[:1])])  # reset here, so that the kernels are fewer
    last, states = jax.lax.scan(step, _reset(is_first[0], state), (inputs, ends), unroll=steps_per_loop)
    return (states, last), (inputs, state, is_first, kernel, bias, states)


def _backward(gates, steps_per_loop, residuals, gradient):
    inputs, state, is_first, kernel, bias, states = residuals
    before = jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest[:-1]]), state, states)
    before = _reset(is_first, before)
    products, pull_product = jax.vjp(product, before[-1], kernel)

    def step(into_after, now):
        products, x, before, is_first, into_output = now
        into_after = jax.tree.map(jnp.add, into_after, into_output)
        _, pull = jax.vjp(lambda products, before: gates(products, x, before, bias), products, before)
        into_product, (*others, into_h) = pull(into_after)
        return _reset(is_first, (*others, into_h + into_product @ kernel.T)), into_after

    into_outputs, into_last = gradient
    now = products, inputs, before, is_first, into_outputs
    into_state, into_states = jax.lax.scan(step, into_last, now, reverse=True, unroll=steps_per_loop)
    _, pull = jax.vjp(lambda products, x, bias: gates(products, x, before, bias), products, inputs, bias)
    into_products, into_inputs, into_bias = pull(into_states)
    return into_inputs, into_state, None, pull_product(into_products)[1], into_bias


recurrence.defvjp(_forward, _backward)


def _reset(is_first: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return jax.tree.map(lambda leaf: jnp.where(is_first[..., None], 0.0, leaf), state)

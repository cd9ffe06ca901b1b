"""Recurrent layers.

A layer processes a sequence: `layer(x [S, N, features], carry, is_first [S, N])` returns the outputs `[S, N, size]` and
the carry after the last step, `[N, size]`, which is its output. `is_first` resets the carry to 0 before a step.
`steps_per_loop` is the number of steps in one iteration of a compiled loop. Every trained bias begins at 0.
"""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.lax import broadcast_to_rank

from grpo_jax.policies.dense import Dense, orthogonal, product


class GRU(nn.Module):
    """Gated recurrent units (https://arxiv.org/abs/1406.1078), with the reset gate after the product, as in cuDNN.

    r = σ(W_r x + U_r h),  z = σ(W_z x + U_z h),  n = tanh(W_n x + r (U_n h + b)),  h' = (1 - z) n + z h
    """

    size: int
    steps_per_loop: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, carry: jax.Array, is_first: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Processes a sequence."""
        inputs = Dense(3 * self.size, kernel_init=gates(3), name="input")(x)
        kernel = self.param("recurrent_kernel", gates(3), (self.size, 3 * self.size), jnp.float32)
        bias = self.param("recurrent_bias", nn.initializers.zeros, (self.size,), jnp.float32)
        states = recurrence(self.steps_per_loop, inputs, carry, is_first, kernel, bias)
        return states, states[-1]


class MinGRU(nn.Module):
    """A minimal gated recurrent unit (https://arxiv.org/abs/2410.01201), a diagonal linear recurrence.

        z = σ(W_z x),  h' = (1 - z) h + z W_h x

    The gate does not depend on h, so an associative scan computes all steps at once, in logarithmic depth. At the first
    step of an episode the factor of h is 0 (https://arxiv.org/abs/2303.03982).
    """

    size: int
    steps_per_loop: int = 1  # there is no loop

    @nn.compact
    def __call__(self, x: jax.Array, carry: jax.Array, is_first: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Processes a sequence."""
        z, new = jnp.split(Dense(2 * self.size, kernel_init=gates(2), name="input")(x), 2, axis=-1)
        z = nn.sigmoid(z)
        keep, add = jnp.where(is_first[..., None], 0.0, 1.0 - z), z * new
        add = add.at[0].add(keep[0] * carry)

        def compose(first, second):
            """The steps h -> keep h + add, one after the other."""
            return second[0] * first[0], second[0] * first[1] + second[1]

        _, outputs = jax.lax.associative_scan(compose, (keep, add))
        return outputs, outputs[-1]


RECURRENT = {"gru": GRU, "mingru": MinGRU}
"""By the name of the recurrent layer."""


def gates(number: int) -> Callable:
    """An initialiser of the matrices of `number` gates, each orthogonal, side by side: `[inputs, number * size]`."""

    def init(key, shape, dtype=jnp.float32):
        keys = jax.random.split(key, number)
        return jnp.concatenate([orthogonal(1.0)(key, (shape[0], shape[1] // number), dtype) for key in keys], axis=1)

    return init


def gru_cell(h_product: jax.Array, x: jax.Array, h: jax.Array, bias: jax.Array) -> jax.Array:
    """The state `[..., size]` after a step of `GRU`, from products with h and x, `[..., 3 * size]`, and the state h."""
    gates = [2 * h.shape[-1]]
    (x_gates, x_new), (h_gates, h_new) = (jnp.split(part, gates, axis=-1) for part in (x, h_product))
    r, z = jnp.split(nn.sigmoid(x_gates + h_gates), 2, axis=-1)
    return (1.0 - z) * jnp.tanh(x_new + r * (h_new + broadcast_to_rank(bias, h.ndim))) + z * h


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def recurrence(
    steps_per_loop: int, inputs: jax.Array, h: jax.Array, is_first: jax.Array, kernel: jax.Array, bias: jax.Array
) -> jax.Array:
    """All states of `h_t = gru_cell(h_{t-1} @ kernel, x_t, h_{t-1}, bias)`.

    The gradient leaves only what depends on the next step inside a loop: the gradients of states. Those of inputs,
    kernel and bias come after it, for all steps at once. `h @ kernel` is stored, and what the cell computes from it is
    computed again. That saves an accelerator most launches. `jax.jvp` raises an error.

    Args:
      steps_per_loop: steps in one iteration of the compiled loops (unrolling).
      inputs: `[S, N, 3 * size]`; at least one step.
      h: `[N, size]`, the state before the first step.
      is_first: `[S, N]` bool; the state is 0 before such a step.
      kernel: `[size, 3 * size]`.
      bias: `[size]`.

    Returns:
      The state after each step, `[S, N, size]`.
    """
    return _forward(steps_per_loop, inputs, h, is_first, kernel, bias)[0]


def _forward(steps_per_loop, inputs, h, is_first, kernel, bias):
    def step(h, inputs):
        x, next_is_first = inputs
        h_product = product(h, kernel)
        new = gru_cell(h_product, x, h, bias)
        # The reset before the next step comes here, where XLA fuses it with the cell.
        return _reset(next_is_first, new), (new, h_product)

    next_is_first = jnp.concatenate([is_first[1:], jnp.zeros_like(is_first[:1])])
    start = _reset(is_first[0], h)
    _, (states, products) = jax.lax.scan(step, start, (inputs, next_is_first), unroll=steps_per_loop)
    return states, (inputs, h, is_first, kernel, bias, states, products)


def _backward(steps_per_loop, residuals, grad_outputs):
    inputs, h, is_first, kernel, bias, states, products = residuals
    previous = _reset(is_first, jnp.concatenate([h[None], states[:-1]]))
    _, pull_product = jax.vjp(product, previous, kernel)

    def step(grad_state, xs):
        h_product, x, previous, is_first, grad_output = xs
        grad_state = grad_state + grad_output
        _, pull = jax.vjp(lambda h_product, previous: gru_cell(h_product, x, previous, bias), h_product, previous)
        grad_product, grad_h = pull(grad_state)
        return _reset(is_first, grad_h + grad_product @ kernel.T), grad_state

    xs = products, inputs, previous, is_first, grad_outputs
    grad_state, grad_states = jax.lax.scan(step, jnp.zeros_like(h), xs, reverse=True, unroll=steps_per_loop)
    _, pull = jax.vjp(lambda products, inputs, bias: gru_cell(products, inputs, previous, bias), products, inputs, bias)
    grad_products, grad_inputs, grad_bias = pull(grad_states)
    return grad_inputs, grad_state, None, pull_product(grad_products)[1], grad_bias


recurrence.defvjp(_forward, _backward)


def _reset(is_first: jax.Array, h: jax.Array) -> jax.Array:
    return jnp.where(is_first[..., None], 0.0, h)

"""Recurrent layers, and the recurrence over time that they share.

A layer processes a sequence: `layer(x [S, N, features], carry, is_first [S, N])` returns the outputs `[S, N, size]` and
the carry after the last step, a tuple of arrays `[N, size]`, the output the last of them. `is_first` resets the carry
to 0 before a step. `steps_per_loop` is the number of steps in one iteration of a compiled loop.
"""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.lax import broadcast_to_rank

from grpo_jax.policies.dense import Dense, orthogonal, product, side_by_side
from grpo_jax.types import PyTree

Carry = tuple[jax.Array, ...]


class Recurrent(nn.Module):
    """The base of the layers. Initially every matrix of a gate is orthogonal and every trained bias is 0."""

    size: int
    steps_per_loop: int = 1

    num_gates = 1
    num_states = 1

    def initial_carry(self, num_envs: int) -> Carry:
        """Zeros."""
        return (jnp.zeros((num_envs, self.size), jnp.float32),) * self.num_states

    def project(self, x: jax.Array) -> jax.Array:
        """The inputs of all gates at all steps, in one matrix product."""
        return Dense(self.num_gates * self.size, kernel_init=self.gates_init, name="input")(x)

    def loop(self, cell: Callable, x: jax.Array, carry: Carry, is_first: jax.Array, *, has_bias: bool = False):
        """The outputs and the last carry of a cell, for `recurrence`, which computes only what depends on the carry."""
        inputs = self.project(x)
        shape = self.size, self.num_gates * self.size
        kernel = self.param("recurrent_kernel", self.gates_init, shape, jnp.float32)
        bias = self.param("recurrent_bias", nn.initializers.zeros, (self.size,), jnp.float32) if has_bias else ()
        states = recurrence(cell, self.steps_per_loop, inputs, carry, is_first, kernel, bias)
        return states[-1], tuple(state[-1] for state in states)

    @property
    def gates_init(self) -> Callable:
        """The initialiser of the gates' matrices."""
        return side_by_side(orthogonal(1.0), self.num_gates)


class GRU(Recurrent):
    """Gated recurrent units (https://arxiv.org/abs/1406.1078), with the reset gate after the product, as in cuDNN.

    r = σ(W_r x + U_r h),  z = σ(W_z x + U_z h),  n = tanh(W_n x + r (U_n h + b)),  h' = (1 - z) n + z h
    """

    num_gates = 3

    @nn.compact
    def __call__(self, x: jax.Array, carry: Carry, is_first: jax.Array) -> tuple[jax.Array, Carry]:
        """Processes a sequence."""
        return self.loop(gru_cell, x, carry, is_first, has_bias=True)


class LSTM(Recurrent):
    """Long short-term memory (https://doi.org/10.1162/neco.1997.9.8.1735), with a forget gate that begins open.

        i, f, o = σ(W x + U h + (0, 1, 0)),  g = tanh(W_g x + U_g h),  c' = f c + i g,  h' = o tanh(c')

    The carry is (c, h).
    """

    num_gates = 4
    num_states = 2

    @nn.compact
    def __call__(self, x: jax.Array, carry: Carry, is_first: jax.Array) -> tuple[jax.Array, Carry]:
        """Processes a sequence."""
        return self.loop(lstm_cell, x, carry, is_first)


class MinGRU(Recurrent):
    """A minimal gated recurrent unit (https://arxiv.org/abs/2410.01201), a diagonal linear recurrence.

        z = σ(W_z x),  h' = (1 - z) h + z W_h x

    The gate does not depend on h, so an associative scan computes all steps at once, in logarithmic depth. At the first
    step of an episode the factor of h is 0 (https://arxiv.org/abs/2303.03982).
    """

    num_gates = 2

    @nn.compact
    def __call__(self, x: jax.Array, carry: Carry, is_first: jax.Array) -> tuple[jax.Array, Carry]:
        """Processes a sequence."""
        z, new = jnp.split(self.project(x), 2, axis=-1)
        z = nn.sigmoid(z)
        keep, add = jnp.where(is_first[..., None], 0.0, 1.0 - z), z * new
        add = add.at[0].add(keep[0] * carry[0])

        def compose(first, second):
            """The steps h -> keep h + add, one after the other."""
            return second[0] * first[0], second[0] * first[1] + second[1]

        _, outputs = jax.lax.associative_scan(compose, (keep, add))
        return outputs, (outputs[-1],)


RECURRENT = {"gru": GRU, "lstm": LSTM, "mingru": MinGRU}
"""By the name of the recurrent layer."""


def gru_cell(h_product: jax.Array, x: jax.Array, state: Carry, bias: jax.Array) -> Carry:
    """One step of `GRU`, for `recurrence`: `[..., 3 * size]` and the state `[..., size]` to the next state."""
    (h,) = state
    gates = [2 * h.shape[-1]]
    (x_gates, x_new), (h_gates, h_new) = (jnp.split(part, gates, axis=-1) for part in (x, h_product))
    r, z = jnp.split(nn.sigmoid(x_gates + h_gates), 2, axis=-1)
    return ((1.0 - z) * jnp.tanh(x_new + r * (h_new + broadcast_to_rank(bias, h.ndim))) + z * h,)


def lstm_cell(h_product: jax.Array, x: jax.Array, state: Carry, bias: tuple[()]) -> Carry:
    """One step of `LSTM`, for `recurrence`: `[..., 4 * size]` and the state, two `[..., size]`, to the next state."""
    c, _ = state
    i, f, o, g = jnp.split(x + h_product, 4, axis=-1)
    c = nn.sigmoid(f + 1.0) * c + nn.sigmoid(i) * jnp.tanh(g)
    return c, nn.sigmoid(o) * jnp.tanh(c)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def recurrence(
    cell: Callable,
    steps_per_loop: int,
    inputs: jax.Array,
    state: Carry,
    is_first: jax.Array,
    kernel: jax.Array,
    bias: PyTree,
) -> Carry:
    """All states of `s_t = cell(h_{t-1} @ kernel, x_t, s_{t-1}, bias)`, where `h` is the last array of a state.

    The gradient leaves only what depends on the next step inside a loop: the gradients of states. Those of inputs,
    kernel and bias come after it, for all steps at once. `h @ kernel` is stored, and what `cell` computes from it is
    computed again. That saves an accelerator most launches. `jax.jvp` raises an error.

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

"""Recurrent layers.

Each processes a sequence: `layer(x [S, N, features], carry, is_first [S, N])` returns the outputs `[S, N, size]` and
the carry after the last step. `is_first` resets the carry to 0 before a step. `size` is the number of units, and
`steps_per_loop` the number of steps in one iteration of a compiled loop, in layers with such a loop.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.lax import broadcast_to_rank

from grpo_jax.policies.dense import Dense, orthogonal, side_by_side
from grpo_jax.policies.recurrence import recurrence


def gru_cell(h_product: jax.Array, x: jax.Array, state: tuple[jax.Array], bias: jax.Array) -> tuple[jax.Array]:
    """One step of `GRU`, for `recurrence`: `[..., 3 * size]` and the state `[..., size]` to the next state."""
    (h,) = state
    gates = [2 * h.shape[-1]]
    (x_gates, x_new), (h_gates, h_new) = (jnp.split(part, gates, axis=-1) for part in (x, h_product))
    r, z = jnp.split(nn.sigmoid(x_gates + h_gates), 2, axis=-1)
    return ((1.0 - z) * jnp.tanh(x_new + r * (h_new + broadcast_to_rank(bias, h.ndim))) + z * h,)


def lstm_cell(h_product: jax.Array, x: jax.Array, state: tuple[jax.Array, jax.Array], bias: tuple[()]) -> tuple:
    """One step of `LSTM`, for `recurrence`: `[..., 4 * size]` and the state, two `[..., size]`, to the next state."""
    c, _ = state
    i, f, o, g = jnp.split(x + h_product, 4, axis=-1)
    c = nn.sigmoid(f + 1.0) * c + nn.sigmoid(i) * jnp.tanh(g)
    return c, nn.sigmoid(o) * jnp.tanh(c)


class GRU(nn.Module):
    """Gated recurrent units (https://arxiv.org/abs/1406.1078), with the reset gate after the product, as in cuDNN.

        r = σ(W_r x + U_r h),  z = σ(W_z x + U_z h),  n = tanh(W_n x + r (U_n h + b)),  h' = (1 - z) n + z h

    Initially every W and U is orthogonal and every bias is 0. The carry and the output are h, `[N, size]`.
    """

    size: int
    steps_per_loop: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, carry: jax.Array, is_first: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Processes a sequence."""
        gates = side_by_side(orthogonal(1.0), 3)
        # One matrix product for the inputs of all steps; the recurrence computes only what depends on the carry.
        inputs = Dense(3 * self.size, kernel_init=gates, name="input")(x)
        kernel = self.param("recurrent_kernel", gates, (self.size, 3 * self.size), jnp.float32)
        bias = self.param("recurrent_bias", nn.initializers.zeros, (self.size,), jnp.float32)

        (h,) = recurrence(gru_cell, self.steps_per_loop, inputs, (carry,), is_first, kernel, bias)
        return h, h[-1]

    def initial_carry(self, num_envs: int) -> jax.Array:
        """Zeros."""
        return jnp.zeros((num_envs, self.size), jnp.float32)


class LSTM(nn.Module):
    """Long short-term memory (https://doi.org/10.1162/neco.1997.9.8.1735), with a forget gate that begins open.

        i, f, o = σ(W x + U h + (0, 1, 0)),  g = tanh(W_g x + U_g h),  c' = f c + i g,  h' = o tanh(c')

    Initially every W and U is orthogonal and every trained bias is 0. The carry is (c, h), each `[N, size]`, the output
    h.
    """

    size: int
    steps_per_loop: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, carry: Any, is_first: jax.Array) -> tuple[jax.Array, Any]:
        """Processes a sequence."""
        gates = side_by_side(orthogonal(1.0), 4)
        inputs = Dense(4 * self.size, kernel_init=gates, name="input")(x)
        kernel = self.param("recurrent_kernel", gates, (self.size, 4 * self.size), jnp.float32)

        c, h = recurrence(lstm_cell, self.steps_per_loop, inputs, carry, is_first, kernel, ())
        return h, (c[-1], h[-1])

    def initial_carry(self, num_envs: int) -> tuple[jax.Array, jax.Array]:
        """Zeros."""
        return (jnp.zeros((num_envs, self.size), jnp.float32),) * 2


class MinGRU(nn.Module):
    """A minimal gated recurrent unit (https://arxiv.org/abs/2410.01201), a diagonal linear recurrence.

        z = σ(W_z x),  h' = (1 - z) h + z W_h x

    The gate does not depend on h, so an associative scan computes all steps at once, in logarithmic depth. At the first
    step of an episode the factor of h is 0 (https://arxiv.org/abs/2303.03982). Initially every W is orthogonal and
    every bias is 0. The carry and the output are h, `[N, size]`.
    """

    size: int

    @nn.compact
    def __call__(self, x: jax.Array, carry: jax.Array, is_first: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Processes a sequence."""
        both = Dense(2 * self.size, kernel_init=side_by_side(orthogonal(1.0), 2), name="input")(x)
        z, new = jnp.split(both, 2, axis=-1)
        z = nn.sigmoid(z)
        keep, add = jnp.where(is_first[..., None], 0.0, 1.0 - z), z * new
        add = add.at[0].add(keep[0] * carry)

        def compose(first, second):
            """The steps h -> keep h + add, one after the other."""
            return second[0] * first[0], second[0] * first[1] + second[1]

        _, outputs = jax.lax.associative_scan(compose, (keep, add))
        return outputs, outputs[-1]

    def initial_carry(self, num_envs: int) -> jax.Array:
        """Zeros."""
        return jnp.zeros((num_envs, self.size), jnp.float32)


RECURRENT = {"gru": GRU, "lstm": LSTM, "mingru": MinGRU}
"""By the name of the recurrent layer."""


def make_recurrent(name: str, size: int, steps_per_loop: int) -> Callable | None:
    """`() -> layer` for a name in `RECURRENT`; None for "none"."""
    if name == "none":
        return None
    layer = functools.partial(RECURRENT[name], size)
    return layer if name == "mingru" else functools.partial(layer, steps_per_loop=steps_per_loop)

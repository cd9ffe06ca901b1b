"""A gated recurrent unit: memory between torso and heads."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from grpo_jax.networks.dense import Dense, dot_general
from grpo_jax.networks.initializers import orthogonal, side_by_side


class GRU(nn.Module):
    """Gated recurrent units (https://arxiv.org/abs/1406.1078), the reset gate after the product, as cuDNN has it.

        r = σ(W_r x + U_r h),  z = σ(W_z x + U_z h),  n = tanh(W_n x + r (U_n h + b)),  h' = (1 - z) n + z h

    Every W and U starts orthogonal, every bias at 0.
    """

    size: int

    @nn.compact
    def __call__(self, x: jax.Array, carry: jax.Array, starts: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Runs over a sequence.

        Args:
          x: `[S, N, features]`.
          carry: `[N, size]`, before the first step.
          starts: `[S, N]` bool: the carry is 0 before this step, whatever was before.

        Returns:
          The carry after each step, `[S, N, size]`, and after the last.
        """
        gates = side_by_side(orthogonal(1.0), 3)
        # One matrix product for the inputs of all steps: only what depends on the carry is left for the scan.
        inputs = Dense(3 * self.size, kernel_init=gates, name="input")(x)
        kernel = self.param("recurrent_kernel", gates, (self.size, 3 * self.size), jnp.float32)
        bias = self.param("recurrent_bias", nn.initializers.zeros, (self.size,), jnp.float32)

        def cell(h, step):
            x, start = step
            h = jnp.where(start[:, None], 0.0, h)
            x_gates, x_new = jnp.split(x, [2 * self.size], axis=-1)
            h_gates, h_new = jnp.split(dot_general(h, kernel, (((1,), (0,)), ((), ()))), [2 * self.size], axis=-1)
            r, z = jnp.split(nn.sigmoid(x_gates + h_gates), 2, axis=-1)
            h = (1.0 - z) * jnp.tanh(x_new + r * (h_new + bias)) + z * h
            return h, h

        carry, outputs = jax.lax.scan(cell, carry, (inputs, starts))
        return outputs, carry

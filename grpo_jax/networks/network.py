"""Torso, memory and heads as one flax module."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from grpo_jax.networks.dense import Dense
from grpo_jax.networks.gru import GRU
from grpo_jax.networks.initializers import orthogonal


class Head(NamedTuple):
    """A linear layer at the end of a network."""

    num_outputs: int
    scale: float  # gain of the initial weights


class Network(nn.Module):
    """A torso, a GRU if there is memory, and linear heads."""

    torso: Callable  # (x [N, ...]) -> [N, features]; makes its layers in this module
    memory_size: int  # 0 without memory
    heads: tuple[Head, ...]

    @nn.compact
    def __call__(self, x: jax.Array, carry: Any, starts: jax.Array) -> tuple[list[jax.Array], jax.Array, Any]:
        """Runs over a sequence; only the memory goes step by step.

        Args:
          x: `[S, N, ...]` observations.
          carry: `[N, memory_size]` before the first step; anything without memory.
          starts: `[S, N]` bool: the first observation of an episode; anything without memory.

        Returns:
          The output of each head, `[S, N, num_outputs]`, what the heads read, `[S, N, features]`, and the carry after
          the last step.
        """
        batch_shape = x.shape[:2]
        x = self.torso(x.reshape(-1, *x.shape[2:]))
        if self.memory_size:
            x, carry = GRU(self.memory_size)(x.reshape(*batch_shape, -1), carry, starts)
            x = x.reshape(-1, self.memory_size)
        outputs = [Dense(head.num_outputs, kernel_init=orthogonal(head.scale))(x) for head in self.heads]
        return [output.reshape(*batch_shape, -1) for output in outputs], x.reshape(*batch_shape, -1), carry

    def initial_carry(self, num_envs: int) -> Any:
        """`[num_envs, memory_size]` of zeros; () without memory."""
        return jnp.zeros((num_envs, self.memory_size), jnp.float32) if self.memory_size else ()

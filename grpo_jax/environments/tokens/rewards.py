"""Rewards of completions on plain arrays, and a reward that is computed on the host."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.host_calls import call_host
from grpo_jax.precision import at_least_float32


def overlong_punishment(lengths: jax.Array, *, max_length: float, buffer: float) -> jax.Array:
    """A penalty that grows linearly over the last `buffer` steps before the limit; add it to the score.

        0                                       if length <= max_length - buffer
        (max_length - buffer - length) / buffer up to max_length
        -1                                      beyond

    DAPO's soft overlong punishment (https://arxiv.org/abs/2503.14476, equation 13).

    Args:
      lengths: number of steps in each rollout, any shape.
      max_length: the limit, in steps.
      buffer: width of the ramp, in steps; 0 punishes only what exceeds the limit.

    Returns:
      The same shape, in [-1, 0].
    """
    excess = at_least_float32(lengths) - (max_length - buffer)
    # Lengths are integers, so a ramp of half a step is the same as none.
    return -jnp.clip(excess / jnp.maximum(buffer, 0.5), 0.0, 1.0)


def exact_match(completion: jax.Array, solution: jax.Array) -> jax.Array:
    """1 where a completion equals the solution in every token, else 0.

    Args:
      completion: `[..., L]` integers, with the same padding after its end as the solution.
      solution: `[..., L]`.

    Returns:
      `[...]`, float32.
    """
    return jnp.float32(jnp.all(completion == solution, axis=-1))


def partial_credit(completion: jax.Array, solution: jax.Array) -> jax.Array:
    """The share of the solution's tokens that a completion has at the same position.

    Args:
      completion: `[..., L]` integers, negative where there is no token.
      solution: `[..., L]`, in the same form; without any token the result is 0.

    Returns:
      `[...]`, in [0, 1].
    """
    is_token = solution >= 0
    num_correct = jnp.sum((completion == solution) & is_token, axis=-1)
    return num_correct / jnp.maximum(jnp.sum(is_token, axis=-1), 1)


def on_host(function: Callable[..., float], *arguments: jax.Array) -> jax.Array:
    """Calls `function(*arguments)` on the host, for a reward that cannot be traced, such as a program's verdict.

    Under `vmap` it calls the function for each row in turn. The function must depend on its arguments alone: it may be
    called more than once, or not at all if its value is not needed.

    Args:
      function: takes NumPy arrays and returns a number.
      arguments: arrays.

    Returns:
      Scalar, float32.
    """
    ranks = [jnp.ndim(argument) for argument in arguments]

    def rows(*batched):
        batched = [np.asarray(argument) for argument in batched]
        shape = batched[0].shape[: batched[0].ndim - ranks[0]]
        flat = [argument.reshape(-1, *argument.shape[len(shape) :]) for argument in batched]
        return np.array([function(*row) for row in zip(*flat, strict=True)], np.float32).reshape(shape)

    return call_host(rows, jax.ShapeDtypeStruct((), jnp.float32), *arguments)

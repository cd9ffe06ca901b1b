"""The randomness of a rollout's steps, drawn a block of steps at a time.

A random generator is many small operations, which on a CPU cost as much for one step as for many. The randomness of a
whole long episode would be most of the memory of an evaluation.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from grpo_jax.environments.environment import threefry
from grpo_jax.policies.distributions import Distribution
from grpo_jax.types import PyTree

MAX_BLOCK = 128
"""The most steps in a block."""

MAX_STAGES = 4
"""The most sizes of a carry in a rollout, each of which compiles the step anew."""


def block_length(num_steps: int, most: int | None = None) -> int:
    """The largest divisor of `num_steps` up to `most`, by default `MAX_BLOCK`."""
    most = min(num_steps, most or MAX_BLOCK)
    return max(length for length in range(1, most + 1) if num_steps % length == 0)


def make_stages(num_steps: int, resize: Callable | None) -> list[tuple[int, Callable]]:
    """For each stage of a rollout, the block that it ends before, and the function that gives the carry its size.

    A carry that can be resized has several stages, of whole blocks. A transformer then attends to the part of its cache
    that the stage can fill: with 4 stages 5/8 of the completion on average, where 1/2 is needed. Short completions are
    one block, so they have one stage, and nothing is resized.
    """
    length = block_length(num_steps)
    num_blocks = num_steps // length
    if resize is None or num_blocks == 1:
        return [(num_blocks, lambda carry: carry)]
    num_stages = min(MAX_STAGES, num_blocks)
    ends = [num_blocks * (stage + 1) // num_stages for stage in range(num_stages)]
    return [(end, functools.partial(resize, num_steps=end * length)) for end in ends]


def scan_in_blocks(
    step: Callable,
    start: PyTree,
    key: jax.Array,
    num_steps: int,
    draw: Callable[[jax.Array, int], PyTree],
    steps_per_loop: int = 1,
    resize: Callable | None = None,
) -> tuple[PyTree, PyTree]:
    """`lax.scan` with a random input to each step.

    Args:
      step: `(carry, (randomness, is_first)) -> (carry, output)`; `is_first` is true at the first of all steps.
      start: the carry before the first step.
      key: of all randomness.
      num_steps: `T`.
      draw: `(key, length) -> randomness` for a block of steps, each leaf `[length, ...]`.
      steps_per_loop: steps in one iteration of the compiled loop.
      resize: `(carry, num_steps) -> carry` with space for so many steps from the first; optional.

    Returns:
      The last carry, and the outputs, each leaf `[T, ...]`.
    """
    length = block_length(num_steps)
    num_blocks = num_steps // length

    def block(carry, now):
        key, is_first = now
        steps = draw(key, length), is_first & (jnp.arange(length) == 0)
        return jax.lax.scan(step, carry, steps, unroll=min(steps_per_loop, length))

    blocks = jax.random.split(key, num_blocks), jnp.arange(num_blocks) == 0
    carry, first, outputs = start, 0, []
    for end, fit in make_stages(num_steps, resize):
        now = jax.tree.map(lambda leaf, stage=slice(first, end): leaf[stage], blocks)
        carry, new = jax.lax.scan(block, fit(carry), now, unroll=end - first == 1)
        outputs.append(new)
        first = end
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts).reshape(num_steps, *parts[0].shape[2:]), *outputs)


def step_randomness(
    distribution: Distribution, key: jax.Array, num_steps: int, num_envs: int, num_sharing: int
) -> tuple[PyTree, jax.Array]:
    """The noise of actions, each leaf `[T, B, ...]`, and the keys of environments, `[T, B // num_sharing]`.

    Args:
      distribution: the family of the actions' distributions.
      key: of all randomness.
      num_steps, num_envs: `T` and `B`.
      num_sharing: neighbouring environments that share a key.
    """
    shape = num_steps, num_envs
    key_actions, key_environment = jax.random.split(key)
    noise = distribution.noise(key_actions, shape)
    for leaf in jax.tree.leaves(noise):
        if jnp.shape(leaf)[:2] != shape:  # some steps or environments would share their noise unnoticed
            raise ValueError(
                f"the distribution's noise(key, {shape}) returned shape {jnp.shape(leaf)}, and each array should begin "
                f"with {shape}; noise=jax.random.split gives a key for each sample"
            )
    return noise, jax.random.split(threefry(key_environment), (num_steps, num_envs // num_sharing))


def shared_keys(key: jax.Array, num_envs: int, num_sharing: int) -> jax.Array:
    """`[B]` keys of environments, of which `num_sharing` neighbours have the same."""
    return jnp.repeat(jax.random.split(threefry(key), num_envs // num_sharing), num_sharing, axis=0)

"""Rollouts that stop when every episode has ended, with the results of the full length.

The loop checks every few steps, so it has no fixed length: a GPU's host waits at each check, and where environments are
split over devices they communicate there. Under `vmap` all rows stop together, when the last one has ended.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from grpo_jax.rollouts.randomness import block_length, make_stages
from grpo_jax.types import PyTree


@custom_vmap
def any_in_all_rows(x: jax.Array) -> jax.Array:
    """Whether any element is true, and under `vmap` any of all rows: a loop's condition that all rows share.

    With a condition for each row, `vmap` would copy the whole trajectory at every check.
    """
    return jnp.any(x)


@any_in_all_rows.def_vmap
def _any_in_all_rows_of_batch(axis_size, is_batched, x):
    return any_in_all_rows(x), False


def scan_until_over(
    step: Callable,
    start: PyTree,
    key: jax.Array,
    num_steps: int,
    draw: Callable[[jax.Array, int], PyTree],
    goes_on: Callable[[PyTree], jax.Array],
    *,
    steps_per_check: int,
    steps_per_loop: int = 1,
    resize: Callable | None = None,
) -> tuple[PyTree, PyTree]:
    """As `randomness.scan_in_blocks`, but stops early.

    Args:
      step, start, key, num_steps, draw, steps_per_loop, resize: see there; the randomness of each step is the same.
      goes_on: `(outputs) -> bool`, whether more steps are needed, from the outputs `[n, ...]` of the last `n` steps.
      steps_per_check: the most steps from one check to the next.

    Returns:
      The last carry, and the outputs, each leaf `[T, ...]`; 0 at steps that were not made.
    """
    length = block_length(num_steps)
    part = block_length(length, steps_per_check)
    num_blocks, num_parts = num_steps // length, length // part
    keys = jax.random.split(key, num_blocks)

    def play(carry, randomness, is_first):
        return jax.lax.scan(step, carry, (randomness, is_first), unroll=min(steps_per_loop, part))

    def block(progress):
        i, more, carry, outputs = progress
        randomness = draw(keys[i], length)

        def play_part(progress):
            j, _, carry, outputs = progress
            now = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, j * part, part), randomness)
            first = i * length + j * part
            carry, new = play(carry, now, first + jnp.arange(part) == 0)
            outputs = jax.tree.map(
                lambda all_steps, leaf: jax.lax.dynamic_update_slice_in_dim(all_steps, leaf, first, 0), outputs, new
            )
            return j + 1, goes_on(new), carry, outputs

        inner = jax.lax.while_loop(lambda now: now[1] & (now[0] < num_parts), play_part, (0, more, carry, outputs))
        return i + 1, *inner[1:]

    stages = make_stages(num_steps, resize)
    start = stages[0][1](start)
    one_part = jax.eval_shape(lambda: play(start, draw(key, part), jnp.zeros(part, bool))[1])
    outputs = jax.tree.map(lambda leaf: jnp.zeros((num_steps, *leaf.shape[1:]), leaf.dtype), one_part)
    progress = 0, jnp.array(True), start, outputs
    if num_blocks == 1:  # an outer loop would be one more check
        return block(progress)[2:]
    for end, fit in stages:
        i, more, carry, outputs = progress
        progress = i, more, fit(carry), outputs
        progress = jax.lax.while_loop(lambda now, end=end: now[1] & (now[0] < end), block, progress)
    return progress[2:]

"""A whole rollout in one kernel: environments, policy and sampling, for policies without a carry.

A program of the kernel plays `BLOCK` environments for all steps. It runs the simulator's own step, traced and replayed
on tiles, so any environment is served whose step has operations that kernels have. Noise and start states are drawn
before the kernel.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from grpo_jax.devices.kernels import Vector, check_one_device, launch, load, store
from grpo_jax.devices.tiles import Traced
from grpo_jax.rollouts.randomness import block_length, shared_keys, step_randomness
from grpo_jax.rollouts.resets import advance_where, new_episodes, select
from grpo_jax.rollouts.rollout import Progress, Simulator
from grpo_jax.types import PyTree, RolloutState, Trajectory

BLOCK = 32
"""Environments that a program plays."""
NUM_WARPS = 8
"""Groups of 32 threads in a program."""
MAX_WEIGHTS = 128 * 128
"""The most weights of a layer: on an H100 the operands of a product of twice as many exceed the shared memory."""


def kernel_unroll(
    simulator: Simulator,
    state: RolloutState,
    key: jax.Array,
    *,
    num_steps: int,
    auto_reset: bool,
    num_sharing: int = 1,
    keep_final: bool = False,
) -> tuple[RolloutState, Trajectory]:
    """The same as `Simulator.unroll` with these arguments, in one kernel. Numbers are equal up to rounding.

    With `auto_reset` a start state is drawn for every step, since any may end an episode: `num_steps` times the size of
    the environments' states is needed while the kernel runs, or `starts_per_rollout` times.

    Raises:
      ConfigError: the mesh splits environments or policies over devices.
      NotOnTiles: the environment, the policy or the distribution has an operation that kernels lack.
      ValueError: a step of the environment draws random numbers, or the policy has a carry or a wide layer.
    """
    policy, num_envs = simulator.policy, state.num_envs
    check_one_device("rollout_kernel")
    if policy.has_carry:
        raise ValueError("the kernel keeps no carry of a policy, but this policy has a recurrent layer or a cache")
    largest = max((leaf.size for leaf in jax.tree.leaves(simulator.params)), default=0)
    if largest > MAX_WEIGHTS:
        raise ValueError(f"a layer of {largest} weights is more than fits into shared memory, {MAX_WEIGHTS}")
    key_reset, key_steps = jax.random.split(key)
    environment_params, start = state.environment_params, state._replace(environment_params=None)
    progress, fresh = simulator.first_progress(start, num_steps, auto_reset, keep_final), None
    if auto_reset:
        num_starts = min(simulator.starts_per_rollout or num_steps, num_steps)
        fresh = _start_states(simulator, environment_params, shared_keys(key_reset, num_envs, num_sharing), num_starts)
    noise = _noise(policy, key_steps, num_steps, num_envs, num_sharing)
    truncations = progress.truncations
    if not all(leaf.size for leaf in jax.tree.leaves(truncations)):  # kernels take no empty arrays
        progress = progress._replace(truncations=None)
    progress, trajectory = _play(simulator, Inputs(environment_params, noise, fresh, progress), num_steps)
    if progress.truncations is None:
        progress = progress._replace(truncations=truncations)
    return simulator.complete(state, progress, trajectory, auto_reset, keep_final)


class Inputs(NamedTuple):
    """The arrays that the kernel reads."""

    environment_params: PyTree  # each leaf [B, ...]
    noise: PyTree  # each leaf [T, B, ...], of the actions
    fresh: PyTree  # K pairs (states, observations), [K, B, ...], which episodes use in turn; None: no resets
    progress: Progress  # before the first step


def _start_states(simulator, environment_params, keys, num_starts):
    """The first `num_starts` start states of each environment, as in `resets.make_start_states`."""

    def draw(num_ended):
        keys_ended = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, num_ended)
        return jax.vmap(simulator.environment.reset)(keys_ended, environment_params)

    return jax.vmap(draw)(jnp.arange(num_starts))


def _noise(policy, key, num_steps, num_envs, num_sharing):
    """`[T, B, ...]`: the noise of `randomness.scan_in_blocks`, of all its blocks."""
    length = block_length(num_steps)

    def draw(key):
        return step_randomness(policy.distribution, key, length, num_envs, num_sharing)[0]

    blocks = jax.lax.map(draw, jax.random.split(key, num_steps // length))
    return jax.tree.map(lambda leaf: leaf.reshape(num_steps, *leaf.shape[2:]), blocks)


def _play(simulator, inputs, num_steps) -> tuple[Progress, Trajectory]:
    """The progress after the last step, and the record of all steps, `[T, B, ...]`."""
    num_envs = inputs.progress.state.num_envs
    step = _trace(simulator, inputs)
    layout = Vector(step.captured)
    end = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), inputs.progress)
    record = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((num_steps, num_envs, *leaf.shape[1:]), leaf.dtype), step.results[1]
    )
    return launch(
        functools.partial(_rollout_kernel, step, layout, num_steps),
        (end, record),
        *(layout.pack(step.captured), inputs),
        num_programs=-(-num_envs // BLOCK),
        num_warps=NUM_WARPS,
        name="rollout_kernel",
    )


def _rollout_kernel(step, layout, num_steps, captured_ref, refs, end_refs, record_refs):
    """One program: all steps of its environments."""
    rows = pl.program_id(0) * BLOCK + jnp.arange(BLOCK)
    captured = layout.load(captured_ref)
    params = [load(ref, rows) for ref in jax.tree.leaves(refs.environment_params)]
    num_starts = min((ref.shape[0] for ref in jax.tree.leaves(refs.fresh)), default=num_steps)

    def play(t, progress):
        noise = [load(ref, rows, at=(t,)) for ref in jax.tree.leaves(refs.noise)]
        which = progress.num_ended % num_starts if num_starts < num_steps else progress.num_ended
        fresh = [load(ref, rows, at=(which,)) for ref in jax.tree.leaves(refs.fresh)]
        progress, record = step.on_tiles(*captured, *params, *noise, *fresh, *jax.tree.leaves(progress), None)
        jax.tree.map(lambda ref, tile: store(ref, tile, rows, at=(t,)), record_refs, record)
        return progress

    end = jax.lax.fori_loop(0, num_steps, play, jax.tree.map(lambda ref: load(ref, rows), refs.progress))
    jax.tree.map(lambda ref, tile: store(ref, tile, rows), end_refs, end)


def _trace(simulator, inputs) -> Traced:
    """One step of a block of environments, traced: the next progress, and the record."""

    def step(environment_params, noise, fresh, progress, keys):
        policy, before = simulator.policy, progress.state
        alive = jnp.ones(BLOCK, bool) if progress.alive is None else progress.alive
        after, record = simulator._step(
            *(before, environment_params, alive, keys),
            lambda distribution: policy.distribution.from_noise(distribution, noise),
        )
        truncations = progress.truncations and progress.truncations.add(record.truncated, after)
        if fresh is None:
            return Progress(advance_where(alive, before, after), truncations, alive=alive & ~record.ended), record
        after = select(record.ended, new_episodes(*fresh, policy.initial_carry(simulator.params, BLOCK)), after)
        num_ended = progress.num_ended + record.ended
        return Progress(after, truncations, num_ended=num_ended), record._replace(valid=None)

    def block(leaf):
        return jax.ShapeDtypeStruct((BLOCK, *leaf.shape[1:]), leaf.dtype)

    def block_of_step(leaf):
        return jax.ShapeDtypeStruct((BLOCK, *leaf.shape[2:]), leaf.dtype)

    traced = Traced(
        step,
        jax.tree.map(block, inputs.environment_params),
        *jax.tree.map(block_of_step, (inputs.noise, inputs.fresh)),
        jax.tree.map(block, inputs.progress),
        jax.eval_shape(lambda: shared_keys(jax.random.key(0), BLOCK, 1)),
    )
    if traced.uses_argument[-1]:
        raise ValueError("kernels draw no random numbers, but a step of this environment does")
    return traced

"""A whole rollout in one kernel: environments, policy and sampling, for policies without a carry.

A program of the kernel plays `BLOCK` environments for all steps. It runs the simulator's own step, traced and replayed
on tiles, so any environment is served whose step has operations that kernels have. Noise and start states are drawn
before the kernel.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from grpo_jax.devices.kernels import Vector, launch, load, store
from grpo_jax.devices.tiles import Traced
from grpo_jax.rollouts.finals import Truncations, num_finals
from grpo_jax.rollouts.randomness import block_length, shared_keys, step_randomness
from grpo_jax.rollouts.resets import advance_where, new_episodes, select
from grpo_jax.types import PyTree, RolloutState, Trajectory

BLOCK = 32
"""Environments that a program plays."""
NUM_WARPS = 8
"""Groups of 32 threads in a program."""


def kernel_unroll(
    simulator: Any,
    state: RolloutState,
    key: jax.Array,
    *,
    num_steps: int,
    auto_reset: bool,
    num_sharing: int = 1,
    keep_final: bool = False,
) -> tuple[RolloutState, Trajectory]:
    """The same as `Simulator.unroll` of these arguments, in one kernel; numbers are equal up to rounding.

    Start states are drawn for every step, since any may end an episode: `num_steps` times the size of the environments'
    states is needed while the kernel runs.

    Raises:
      NotOnTiles: the environment, the policy or the distribution has an operation that kernels lack.
      ValueError: the environment draws random numbers in its steps, or the policy has a carry.
    """
    environment, policy, num_envs = simulator.environment, simulator.policy, state.num_envs
    if policy.has_carry:
        raise ValueError("the kernel keeps no carry of a policy, but this policy has a recurrent layer or a cache")
    key_reset, key_steps = jax.random.split(key)
    environment_params, start = state.environment_params, state._replace(environment_params=None)
    fresh = None
    if auto_reset:
        fresh = _start_states(simulator, environment_params, shared_keys(key_reset, num_envs, num_sharing), num_steps)
    num_slots = num_finals(environment, num_steps, auto_reset) - 1 if policy.has_critic or keep_final else 0
    truncations = Truncations.none(num_slots, start)
    carry = Carry(
        state=start,
        alive=jnp.ones(num_envs, bool),
        num_ended=jnp.zeros(num_envs, jnp.int32),
        truncations=truncations if num_slots else None,
    )
    inputs = Inputs(environment_params, _noise(policy, key_steps, num_steps, num_envs, num_sharing), fresh, carry)
    end, record = _play(simulator, inputs, num_steps)

    trajectory = record._replace(carry=jax.tree.map(lambda leaf: leaf[None], policy.sequence_carry(start.policy_carry)))
    finals = (end.truncations or truncations).and_last(end.state)
    trajectory = simulator._with_final_values(trajectory, finals, keep_final)
    return end.state._replace(environment_params=environment_params), trajectory


class Carry(NamedTuple):
    """What one step hands to the next."""

    state: RolloutState  # each leaf [B, ...]
    alive: jax.Array  # [B] bool: the episode of a rollout without resets is not over
    num_ended: jax.Array  # [B] int32 number of episodes that ended
    truncations: Truncations | None  # slots [S, B, ...], count [B]; None: none are kept


class Inputs(NamedTuple):
    """What is known before the first step."""

    environment_params: PyTree  # each leaf [B, ...]
    noise: PyTree  # [T, B, ...] of the actions
    fresh: PyTree  # [T, B, ...] start states and observations, by the number of episodes that ended; None: no resets
    carry: Carry  # before the first step


def _start_states(simulator, environment_params, keys, num_steps):
    """What `resets.make_start_states` draws after each number of ends."""

    def draw(num_ended):
        keys_ended = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, num_ended)
        return jax.vmap(simulator.environment.reset)(keys_ended, environment_params)

    return jax.vmap(draw)(jnp.arange(num_steps))


def _noise(policy, key, num_steps, num_envs, num_sharing):
    """`[T, B, ...]`: what `randomness.scan_in_blocks` draws, all blocks of it."""
    length = block_length(num_steps)

    def draw(key):
        return step_randomness(policy.distribution, key, length, num_envs, num_sharing)[0]

    blocks = jax.lax.map(draw, jax.random.split(key, num_steps // length))
    return jax.tree.map(lambda leaf: leaf.reshape(num_steps, *leaf.shape[2:]), blocks)


def _play(simulator, inputs, num_steps) -> tuple[Carry, Trajectory]:
    """The last carry, and the record of all steps."""
    num_envs = inputs.carry.state.num_envs
    traced = _trace(simulator, inputs)
    layout = Vector(traced.captured)

    def at_full_size(leaf, axis):
        return jax.ShapeDtypeStruct((*leaf.shape[:axis], num_envs, *leaf.shape[axis + 1 :]), leaf.dtype)

    end, record = traced.results
    record = jax.tree.map(lambda leaf: at_full_size(leaf, 0), record)
    record = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((num_steps, *leaf.shape), leaf.dtype), record)
    return launch(
        functools.partial(_rollout_kernel, traced, layout, num_steps),
        (jax.tree.map(at_full_size, end, _env_axes(end)), record),
        *(layout.pack(traced.captured), inputs),
        num_programs=-(-num_envs // BLOCK),
        num_warps=NUM_WARPS,
        name="rollout_kernel",
    )


def _rollout_kernel(traced, layout, num_steps, shared_ref, refs, end_refs, record_refs):
    """One program: all steps of its environments."""
    rows = pl.program_id(0) * BLOCK + jnp.arange(BLOCK)
    axes = _env_axes(refs.carry)
    shared = layout.load(shared_ref)
    params = [load(ref, rows) for ref in jax.tree.leaves(refs.environment_params)]

    def play(t, carry):
        noise = [load(ref, rows, at=(t,)) for ref in jax.tree.leaves(refs.noise)]
        fresh = [load(ref, rows, at=(carry.num_ended,)) for ref in jax.tree.leaves(refs.fresh)]
        carry, record = traced.on_tiles(*shared, *params, *noise, *fresh, *jax.tree.leaves(carry), None)
        jax.tree.map(lambda ref, tile: store(ref, tile, rows, at=(t,)), record_refs, record)
        return carry

    start = jax.tree.map(lambda ref, axis: load(ref, rows, axis=axis), refs.carry, axes)
    end = jax.lax.fori_loop(0, num_steps, play, start)
    jax.tree.map(lambda ref, tile, axis: store(ref, tile, rows, axis=axis), end_refs, end, axes)


def _env_axes(carry: Carry) -> Carry:
    """The axis of the environments in each leaf."""
    axes = jax.tree.map(lambda _: 0, carry)
    if carry.truncations is None:
        return axes
    slots = jax.tree.map(lambda _: 1, carry.truncations.slots)
    return axes._replace(truncations=axes.truncations._replace(slots=slots))


def _trace(simulator, inputs) -> Traced:
    """One step of a block of environments, traced: the next carry, and the record."""

    def step(environment_params, noise, fresh, carry, keys):
        policy, before = simulator.policy, carry.state
        after, record = simulator._step(
            *(before, environment_params, carry.alive, keys),
            lambda distribution: policy.distribution.from_noise(distribution, noise),
        )
        ended, alive = record.ended, carry.alive
        truncations = carry.truncations and carry.truncations.add(record.truncated, after)
        if fresh is None:
            after, alive = advance_where(alive, before, after), alive & ~ended
        else:
            after = select(ended, new_episodes(*fresh, policy.initial_carry(simulator.params, BLOCK)), after)
        return Carry(after, alive, carry.num_ended + ended, truncations), record

    def shapes(tree, axis):
        """Of a block: `axis` environments come before, and the axes before are dropped."""
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((BLOCK, *leaf.shape[axis + 1 :]), leaf.dtype), tree)

    def carry_shape(leaf, axis):
        return jax.ShapeDtypeStruct((*leaf.shape[:axis], BLOCK, *leaf.shape[axis + 1 :]), leaf.dtype)

    keys = jax.eval_shape(lambda: shared_keys(jax.random.key(0), BLOCK, 1))
    traced = Traced(
        step,
        shapes(inputs.environment_params, 0),
        shapes(inputs.noise, 1),
        shapes(inputs.fresh, 1),
        jax.tree.map(carry_shape, inputs.carry, _env_axes(inputs.carry)),
        keys,
    )
    if traced.uses_argument[-1]:
        raise ValueError("kernels draw no random numbers, but a step of this environment does")
    return traced

"""States that are the same, known by hashes of their bits, and the baseline of visits to the same state."""

from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.baselines.baseline import window_returns
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.objectives.advantages import same_step_leave_one_out
from grpo_jax.observations import leading_shape
from grpo_jax.precision import at_least_float32
from grpo_jax.types import PyTree, Trajectory


def state_hash_values(
    observation: PyTree, final_observation: PyTree, returns: jax.Array, mask: jax.Array, fallback: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The mean return-to-go of other rollouts' visits to the same state, known by the bits of its observation.

        V(s_t^i) = mean {R_u^j : s_u^j = s_t^i, j != i}

    The anchor states of GiGPO (https://arxiv.org/abs/2505.10978), among all rollouts; R_u^j may be of any step u. Final
    states are valued by visits in the first half of the window, whose returns are longer. Two states are the same if
    64 bits of hash are.

    Args:
      observation: each leaf `[T, N, ...]`.
      final_observation: each leaf `[F, N, ...]`, of the observations that no step starts from (see `next_values`).
      returns: `[T, N]` returns-to-go.
      mask: `[T, N]`, true on the valid steps.
      fallback: `[T, N]`, the value where no other rollout visited the state.

    Returns:
      Values `[T, N]` and `[F, N]`, in the units of the returns; final ones are 0 without such a visit.
    """
    returns, fallback = at_least_float32(returns), at_least_float32(fallback)
    num_steps, num_envs = returns.shape
    everything = jax.tree.map(lambda *parts: jnp.concatenate(parts), observation, final_observation)
    shape = leading_shape(everything, 2)
    env = jnp.broadcast_to(jnp.arange(num_envs), shape).reshape(-1)
    states, visitors = state_numbers(everything, env)
    counted = mask.astype(bool) & jnp.isfinite(returns)
    centre = jnp.mean(returns, where=counted)
    centre = jnp.where(jnp.isfinite(centre), centre, 0.0)  # sums over many visits are then of small numbers
    excess = jnp.where(counted, returns - centre, 0.0)

    def mean_of_others(counted):
        late = ((0, shape[0] - num_steps), (0, 0))
        numbers = [jnp.pad(x, late).reshape(-1) for x in (jnp.where(counted, excess, 0.0), counted.astype(jnp.float32))]

        def others(x):
            total, own = (jax.ops.segment_sum(x, ids, env.size)[ids] for ids in (states, visitors))
            return (total - own).reshape(shape)

        total, visits = map(others, numbers)
        return visits > 0, centre + total / jnp.maximum(visits, 1)

    found, values = (x[:num_steps] for x in mean_of_others(counted))
    first_half = jnp.arange(num_steps)[:, None] < max(num_steps // 2, 1)
    found_finally, final_values = (x[num_steps:] for x in mean_of_others(counted & first_half))
    return jnp.where(found, values, fallback), jnp.where(found_finally, final_values, 0.0)


def state_numbers(state: PyTree, env: jax.Array) -> list[jax.Array]:
    """Numbers that are equal for the same state, and for the same state in the same environment, each `[M]`, below `M`.

    Args:
      state: each leaf `[T, N, ...]`, of `M = T * N` states; two are the same if 64 bits of hash are.
      env: `M` environments.
    """
    words = [_words(leaf.reshape(env.size, -1)) for leaf in jax.tree.leaves(state)]
    return _same(*_hashes(jnp.concatenate(words, axis=1)), env.reshape(-1))


def _words(x):
    """The bits of `[M, E]` but the sign of a zero, uint32 `[M, words]`."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = jnp.where(x == 0, 0.0, at_least_float32(x))
    elif x.dtype.itemsize < 4:
        x = x.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(x, jnp.uint32).reshape(x.shape[0], -1)


def _hashes(words):
    """Two hashes of each row of `[M, words]`, uint32 `[M]`."""
    return [jnp.sum(each, axis=1, dtype=jnp.uint32) for each in _mixed_words(words)]


def prefix_hashes(tokens: jax.Array) -> jax.Array:
    """64 bits of hash of the tokens up to each step: uint32 `[T, N, 2]`, of int32 tokens `[T, N]`."""
    words = tokens.astype(jnp.uint32).T
    return jnp.stack([jnp.cumsum(each, axis=1, dtype=jnp.uint32).T for each in _mixed_words(words)], axis=-1)


def _mixed_words(words):
    """Each word of `[M, words]` hashed with its place, in two ways."""
    place = jnp.arange(words.shape[1], dtype=jnp.uint32)
    salts = [_mixed(place + jnp.uint32(offset)) for offset in (0x9E3779B9, 0x3C6EF372)]
    return [_mixed(words ^ salt[None]) for salt in salts]


def _mixed(x):
    """MurmurHash3's finaliser: a bijection of uint32, each bit of which depends on all."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)


def _same(hash_a, hash_b, env):
    """Numbers that are equal for the same state, and for the same state of the same rollout; each `[M]`, below `M`."""
    *keys, order = jax.lax.sort((hash_a, hash_b, env, jnp.arange(env.size)), num_keys=3)
    differs = [jnp.concatenate([jnp.zeros(1, bool), key[1:] != key[:-1]]) for key in keys]
    numbers = differs[0] | differs[1], differs[0] | differs[1] | differs[2]
    return [jnp.zeros(env.size, jnp.int32).at[order].set(jnp.cumsum(new, dtype=jnp.int32)) for new in numbers]


def state_hash_baseline(
    trajectory: Trajectory, policy: Any, params: PyTree, hyperparams: Hyperparams, group_size: int
) -> tuple[jax.Array, jax.Array]:
    """The mean return-to-go of other environments' visits to the same state, or else of the group at the same step.

    With a critic, it values final states; otherwise visits to them do.
    """
    returns, critic_value = window_returns(trajectory, hyperparams)
    fallback = same_step_leave_one_out(returns, trajectory.valid, group_size)
    visits = trajectory.observation, trajectory.final_observation, returns, trajectory.valid
    value, final_value = state_hash_values(*visits, fallback)
    return value, final_value if trajectory.final_value is None else critic_value

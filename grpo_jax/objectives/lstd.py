"""The least-squares baseline: values that are linear in features of the state, solved for once per iteration."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.hyperparams import Hyperparams
from grpo_jax.objectives.features import policy_features
from grpo_jax.objectives.returns import next_values
from grpo_jax.precision import at_least_float32
from grpo_jax.types import PyTree, Trajectory

_sum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
LARGEST_DISCOUNT = 1 - 1e-5
"""Of values: if nothing terminates they grow with the horizon, and their differences would be lost in rounding."""


def lstd_values(
    features: jax.Array,
    final_features: jax.Array,
    rewards: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    is_first: jax.Array,
    mask: jax.Array,
    *,
    discount: float,
    trace: float,
    ridge: float,
    num_folds: int = 4,
) -> tuple[jax.Array, jax.Array]:
    """Values of states by least-squares temporal differences, LSTD(lambda), without a network or a gradient.

        V(s) = w . x(s),  (A / n + ridge I) w = b / n
        A = sum_t z_t (x_t - discount x_{t+1})^T,  b = sum_t z_t r_t,  z_t = x_t + discount trace z_{t-1}

    x(s) is the features, each divided by its root mean square over the batch, and a 1; x_{t+1} is 0 after a
    termination. The eligibility z restarts with every episode. The environments are divided into folds of neighbours,
    and each fold is valued by the w of the others, so that no reward of a rollout has a part in its own values.

    Boyan, Least-squares temporal difference learning (ICML 1999); for the last layer of a network:
    https://arxiv.org/abs/1705.07461.

    Args:
      features: `[T, N, E]`, any dtype.
      final_features: `[F, N, E]`, of the observations that no step starts from (see `next_values`).
      rewards: `[T, N]`.
      terminated, truncated: `[T, N]` bool.
      is_first: `[T, N]` bool, the first step of an episode.
      mask: `[T, N]`, true on the valid steps.
      discount: in [0, 1]; values have at most `LARGEST_DISCOUNT`.
      trace: lambda of the eligibility, in [0, 1]: 0 fits one-step errors, 1 the returns of the window.
      ridge: weight of the penalty on w, in units of the features' mean squares. The constant 1 has a millionth of it.
      num_folds: 2 or more; at most N are made. Static.

    Returns:
      Values `[T, N]` and `[F, N]`, in the units of the returns. The value of a state that is not finite is 0. Such
      states, steps that lead to one and rewards that are not finite have no part in w. Features that are 0 in the
      whole batch have no effect.

    Raises:
      ValueError: for fewer than 2 environments or folds.
    """
    num_envs = rewards.shape[1]
    if num_envs < 2:
        raise ValueError("lstd_values values an environment by others, but there is only one; use num_envs=2 or more")
    if num_folds < 2:
        raise ValueError(f"num_folds={num_folds} leaves no other environments to value one by; use 2 or more")
    num_folds, discount = min(num_folds, num_envs), jnp.minimum(discount, LARGEST_DISCOUNT)
    features, final_features, rewards = map(at_least_float32, (features, final_features, rewards))
    usable, finally_usable = (jnp.all(jnp.isfinite(jnp.square(x)), axis=-1) for x in (features, final_features))
    usable_mask = usable & mask.astype(bool)
    square = jnp.mean(jnp.square(features), axis=(0, 1), where=usable_mask[..., None])
    scale = jnp.where(square > 0, jax.lax.rsqrt(square), 0.0)

    def embed(x, usable):
        x = jnp.where(usable[..., None], x * scale, 0.0)
        return jnp.concatenate([x, usable[..., None].astype(x.dtype)], axis=-1)

    x, final_x = embed(features, usable), embed(final_features, finally_usable)
    following = jax.vmap(next_values, in_axes=(-1, -1, None), out_axes=-1)(x, final_x, truncated)
    following = jnp.where(terminated[..., None], 0.0, following)
    # The last element of an embedded state is 1, or 0 if it is not usable; that of a missing one is NaN.
    known = usable_mask & jnp.isfinite(rewards) & (terminated | (following[..., -1] == 1))
    errors = jnp.where(known[..., None], x - discount * following, 0.0)
    rewards = jnp.where(known, rewards, 0.0)

    z = _eligibility(x, is_first, discount * trace)
    split = functools.partial(_split, num_folds=num_folds)
    weights = _weights_by_others(*map(split, (z, errors, rewards, known)), ridge)

    def value(x):
        return _sum("tkne,ke->tkn", split(x), weights).reshape(len(x), -1)[:, :num_envs]

    return value(x), value(final_x)


def _eligibility(x, is_first, decay):
    """The sum of this and earlier states `[T, N, E]` of an episode, those k steps before times `decay^k`."""

    def accumulate(z, now):
        x, is_first = now
        z = x + decay * jnp.where(is_first[:, None], 0.0, z)
        return z, z

    return jax.lax.scan(accumulate, jnp.zeros_like(x[0]), (x, is_first))[1]


def _split(x, num_folds):
    """`[T, N, ...]` as `[T, K, N / K, ...]`: K folds of neighbours, padded with zeros."""
    padding = [(0, 0), (0, -x.shape[1] % num_folds), *((0, 0),) * (x.ndim - 2)]
    return jnp.pad(x, padding).reshape(len(x), num_folds, -1, *x.shape[2:])


def _weights_by_others(z, errors, rewards, known, ridge):
    """The w of each fold, `[K, E]`, by the steps of the other folds; each argument is `[T, K, N / K, ...]`."""
    others = 1.0 - jnp.eye(z.shape[1], dtype=z.dtype)
    matrix = _sum("jk,kef->jef", others, _sum("tkne,tknf->kef", z, errors))
    vector = _sum("jk,ke->je", others, _sum("tkne,tkn->ke", z, rewards))
    number = jnp.maximum(others @ jnp.sum(known, axis=(0, 2)), 1.0)
    penalty = jnp.full(z.shape[-1], ridge, matrix.dtype).at[-1].multiply(1e-6)
    systems = matrix / number[:, None, None] + jnp.diag(penalty), vector / number[:, None]
    # One after another: batched calls of LAPACK by the programs of several CPU devices wait for each other, forever.
    return jax.lax.map(lambda system: jnp.linalg.solve(*system), systems)


def lstd_baseline(
    trajectory: Trajectory,
    policy: Any,
    params: PyTree,
    hyperparams: Hyperparams,
    group_size: int,
    *,
    features: Callable = policy_features,
    num_folds: int = 4,
) -> tuple[jax.Array, jax.Array]:
    """Values linear in the features of states, fitted to the rollouts of other environments: `lstd_values`.

    Options by `functools.partial`: the features, `policy_features` or `observed`, and the number of folds. The trace is
    `gae_lambda`, the ridge `value_ridge`.
    """
    states, finals = features(trajectory, policy, params)
    return lstd_values(
        states.reshape(*states.shape[:2], -1),
        finals.reshape(*finals.shape[:2], -1),
        trajectory.reward,
        trajectory.terminated,
        trajectory.truncated,
        trajectory.is_first,
        trajectory.valid,
        discount=hyperparams.discount,
        trace=hyperparams.gae_lambda,
        ridge=hyperparams.value_ridge,
        num_folds=num_folds,
    )

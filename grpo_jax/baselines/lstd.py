"""The least-squares baseline: values that are linear in features of the state, solved for once per iteration."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import broadcast_to_rank

from grpo_jax.baselines.baseline import Baseline, Window, no_state, window_of, with_options
from grpo_jax.baselines.features import is_usable, policy_features
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.objectives.returns import next_values
from grpo_jax.precision import at_least_float32, exact_sum
from grpo_jax.types import PyTree

LARGEST_DISCOUNT = 1 - 1e-5
"""Of values: if nothing terminates they grow with the horizon, and their differences would be lost in rounding."""


def lstd_values(
    window: Window,
    *,
    discount: float,
    trace: float,
    ridge: float,
    num_folds: int = 4,
    group_size: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Values of states by least-squares temporal differences, LSTD(lambda), without a network or a gradient.

        V(s) = w . x(s),  (A / n + ridge I) w = b / n
        A = sum_t z_t (x_t - discount x_{t+1})^T,  b = sum_t z_t r_t,  z_t = x_t + discount trace z_{t-1}

    x(s) is the features, each divided by its root mean square over the batch, and a 1; x_{t+1} is 0 after a
    termination. The eligibility z restarts with every episode. The environments are divided into folds of neighbouring
    groups, and each fold is valued by the w of the others, so that the values of a rollout do not depend on the
    rewards of its group.

    Boyan, Least-squares temporal difference learning (ICML 1999); for the last layer of a network:
    https://arxiv.org/abs/1705.07461.

    Args:
      window: of features `[T, N, E]`.
      discount: in [0, 1]; values have at most `LARGEST_DISCOUNT`.
      trace: lambda of the eligibility, in [0, 1]: 0 fits one-step errors, 1 the returns of the window.
      ridge: weight of the penalty on w, in units of the features' mean squares. The constant 1 has a millionth of it.
      num_folds: 2 or more; at most one for each group is made. Static.
      group_size: members of a group, which lie side by side; divides N. Static.

    Returns:
      Values `[T, N]` and `[F, N]`, in the units of the returns. Non-finite states get value 0. They, the steps before
      them and non-finite rewards are left out of the fit. Features that are 0 in the whole batch have no effect.

    Raises:
      ValueError: for fewer than 2 groups or folds.
    """
    num_envs = window.rewards.shape[1]
    num_groups = num_envs // group_size
    if num_groups < 2:
        raise ValueError(
            f"lstd_values values an environment by environments of other groups, but num_envs={num_envs} and "
            f"group_size={group_size} make one group; use num_envs={2 * group_size} or more, or smaller groups"
        )
    if num_folds < 2:
        raise ValueError(f"num_folds={num_folds} leaves no other environments to value one by; use 2 or more")
    fold_size = -(-num_groups // num_folds) * group_size
    features = at_least_float32(window.features)
    counted = is_usable(features) & window.mask.astype(bool)
    square = jnp.mean(jnp.square(features), axis=(0, 1), where=counted[..., None])
    scale = jnp.where(square > 0, jax.lax.rsqrt(square), 0.0)
    x, final_x = (with_constant(each, scale) for each in window[:2])
    steps = lstd_steps(window._replace(features=x, final_features=final_x), discount, trace)
    split = functools.partial(_split, size=fold_size)
    weights = _weights_by_others(jax.tree.map(split, steps), ridge)

    def value(x):
        return exact_sum("tkne,ke->tkn", split(x), weights).reshape(len(x), -1)[:, :num_envs]

    return value(x), value(final_x)


def with_constant(features: jax.Array, scale: jax.Array | float = 1.0) -> jax.Array:
    """Features `[..., E]` times their scale, and a 1; all 0 where they are not usable, `[..., E + 1]`."""
    features = at_least_float32(features)
    usable, scale = is_usable(features)[..., None], broadcast_to_rank(scale, features.ndim)
    return jnp.concatenate([jnp.where(usable, features * scale, 0.0), usable.astype(features.dtype)], axis=-1)


class Steps(NamedTuple):
    """What A and b of LSTD are summed from, step by step: `z_t (x_t - discount x_{t+1})^T` and `z_t r_t`."""

    eligibility: jax.Array  # [T, N, E] z_t
    difference: jax.Array  # [T, N, E] x_t - discount x_{t+1}; 0 where not known
    reward: jax.Array  # [T, N]; 0 where not known
    known: jax.Array  # [T, N] bool: the step is valid, and its reward and both of its states are usable


def lstd_steps(window: Window, discount: jax.Array | float, trace: jax.Array | float) -> Steps:
    """The steps of a window whose features `x` are made by `with_constant`.

    The eligibility of a state decays by discount times trace in each later step of its episode.
    """
    x, final_x, rewards, terminated, truncated, mask, is_first = window
    discount, rewards = jnp.minimum(discount, LARGEST_DISCOUNT), at_least_float32(rewards)
    next_x = jax.vmap(next_values, in_axes=(-1, -1, None), out_axes=-1)(x, final_x, truncated)
    next_x = jnp.where(terminated[..., None], 0.0, next_x)
    # The last element of a state is 1, 0 if it is not usable, and NaN if it is missing.
    usable = mask.astype(bool) & (x[..., -1] == 1)
    known = usable & jnp.isfinite(rewards) & (terminated | (next_x[..., -1] == 1))
    difference = jnp.where(known[..., None], x - discount * next_x, 0.0)
    return Steps(_eligibility(x, is_first, discount * trace), difference, jnp.where(known, rewards, 0.0), known)


def lstd_weights(matrix: jax.Array, vector: jax.Array, number: jax.Array, ridge: jax.Array | float) -> jax.Array:
    """The w `[E]` of `(matrix / number + ridge I) w = vector / number`; the ridge of the constant is a millionth."""
    penalty = jnp.full(vector.shape, ridge, matrix.dtype).at[-1].multiply(1e-6)
    return jnp.linalg.solve(matrix / number + jnp.diag(penalty), vector / number)


def _eligibility(x, is_first, decay):
    """The sum of this and earlier states `[T, N, E]` of an episode, those k steps before times `decay^k`."""

    def accumulate(z, now):
        x, is_first = now
        z = x + decay * jnp.where(is_first[:, None], 0.0, z)
        return z, z

    return jax.lax.scan(accumulate, jnp.zeros_like(x[0]), (x, is_first), unroll=16)[1]


def _split(x, size):
    """`[T, N, ...]` as `[T, K, size, ...]`: folds of so many neighbours, padded with zeros."""
    padding = [(0, 0), (0, -x.shape[1] % size), *((0, 0),) * (x.ndim - 2)]
    return jnp.pad(x, padding).reshape(len(x), -1, size, *x.shape[2:])


def _weights_by_others(steps: Steps, ridge):
    """The w of each fold, `[K, E]`, from the steps of the other folds; steps are `[T, K, N / K, ...]`."""
    others = 1.0 - jnp.eye(steps.reward.shape[1], dtype=steps.reward.dtype)
    matrix = exact_sum("tkne,tknf->kef", steps.eligibility, steps.difference)
    vector = exact_sum("tkne,tkn->ke", steps.eligibility, steps.reward)
    number = jnp.maximum(others @ jnp.sum(steps.known, axis=(0, 2)), 1.0)
    systems = exact_sum("jk,kef->jef", others, matrix), exact_sum("jk,ke->je", others, vector), number
    # One after another: batched calls of LAPACK by the programs of several CPU devices wait for each other, forever.
    return jax.lax.map(lambda system: lstd_weights(*system, ridge), systems)


def lstd_baseline(*, features: Callable = policy_features, num_folds: int = 4) -> Baseline:
    """Values linear in the features of states, fitted to the rollouts of other groups: `lstd_values`.

    The trace is `gae_lambda`, the ridge `value_ridge`.

    Args:
      features: `policy_features` or `observed`.
      num_folds: parts of the environments, each of which has its values from the others.
    """
    return Baseline(no_state, with_options(_lstd_baseline, features=features, num_folds=num_folds))


def _lstd_baseline(
    trajectory, state, policy, params, hyperparams: Hyperparams, group_size: int, *, features: Callable, num_folds: int
) -> tuple[jax.Array, jax.Array, PyTree]:
    window = window_of(trajectory, *features(trajectory, policy, params))
    folds = {"num_folds": num_folds, "group_size": group_size}
    return *lstd_values(window, **least_squares_options(hyperparams), **folds), state


def least_squares_options(hyperparams: Hyperparams) -> dict[str, jax.Array]:
    """The discount, trace and ridge of a least-squares baseline."""
    return {"discount": hyperparams.discount, "trace": hyperparams.gae_lambda, "ridge": hyperparams.value_ridge}

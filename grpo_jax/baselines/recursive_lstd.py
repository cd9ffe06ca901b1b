"""The recursive least-squares baseline: values linear in features of observations, by the steps of earlier rollouts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.baselines.baseline import Baseline, Window, window_of, with_options
from grpo_jax.baselines.features import Scaling, is_usable, observed, random_features, scaling_of
from grpo_jax.baselines.lstd import least_squares_options, lstd_steps, lstd_weights, with_constant
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.precision import at_least_float32, exact_sum
from grpo_jax.types import PyTree, Trajectory

MOST_FEATURES = 4096
"""The matrix of the equations then has 64 MiB, and solving them takes 46 billion operations in each iteration."""

FEW_FEATURES = 64
"""Observations of at most so many numbers have random features beside them: values are seldom linear in so few."""
RANDOM_FEATURES = 128
"""How many they have by default."""


class LeastSquares(NamedTuple):
    """Sums over the steps of earlier rollouts; see `recursive_lstd_values`. Zeros before the first rollout."""

    matrix: jax.Array  # [E, E] A
    vector: jax.Array  # [E] b
    square: jax.Array  # [E] of each feature
    number: jax.Array  # of steps


def recursive_lstd_values(
    sums: LeastSquares | None,
    window: Window,
    *,
    discount: float,
    trace: float,
    ridge: float,
    decay: float,
    fit_every: int = 1,
) -> tuple[jax.Array, jax.Array, LeastSquares]:
    """Values of states by least-squares temporal differences on all earlier rollouts, LSTD(lambda) with forgetting.

        V(s) = w . x(s),  (A + ridge diag(C)) w = b
        A <- decay A + sum_t z_t (x_t - discount x_{t+1})^T,  b <- decay b + sum_t z_t r_t,  C <- decay C + sum_t x_t^2

    x(s) is the features and a 1. z_t = x_t + discount trace z_{t-1} is their eligibility, which restarts with every
    episode. x_{t+1} is 0 after a termination. The values come from the sums before this rollout, so they do not depend
    on its rewards, as with a critic. The features must mean the same in every rollout, as features of an
    observation do; features of a network that is being trained do not (see `lstd_values`).

    Boyan, Least-squares temporal difference learning (ICML 1999); with forgetting: Xu, He and Hu, Efficient
    reinforcement learning using recursive least-squares methods (JAIR 2002), https://arxiv.org/abs/1106.0707.

    Args:
      sums: of the earlier rollouts; None: there were none, and all values are 0.
      window: of features `[T, N, E]`.
      discount: in [0, 1]; values have at most `lstd.LARGEST_DISCOUNT`.
      trace: lambda of the eligibility, in [0, 1]: 0 fits one-step errors, 1 the returns of the window.
      ridge: weight of the penalty on w, in units of the features' mean squares. The constant 1 has a millionth of it.
      decay: in [0, 1], the weight of the earlier rollouts beside this one: 0.95 is a memory of about 20 rollouts.
      fit_every: k: only every k-th of the N environments is in the sums, which take most of the time. Static.

    Returns:
      Values `[T, N]` and `[F, N]`, in the units of the returns, and the sums with this rollout. Non-finite states
      get value 0. They, the steps before them, non-finite rewards, and a rollout with which the sums overflow are left
      out of the fit. Features that have been 0 so far have no effect.

    Raises:
      ValueError: for more than `MOST_FEATURES` features, or `fit_every` below 1.
    """
    num_features = window.features.shape[-1]
    if num_features > MOST_FEATURES:
        raise ValueError(
            f"recursive least squares solves equations for each of {num_features} features in each iteration; "
            f"give it at most {MOST_FEATURES} by features=... and num_random_features=..., or use lstd_baseline, whose "
            "features the network makes"
        )
    if fit_every < 1:
        raise ValueError(f"fit_every={fit_every} would leave no environment in the sums; use 1 for all of them")
    new = _sums_of_steps(jax.tree.map(lambda leaf: leaf[:, ::fit_every], window), discount, trace)
    if sums is None:
        sums = jax.tree.map(jnp.zeros_like, new)
    weights = _weights(sums, ridge)
    following = jax.tree.map(lambda old, new: decay * old + new, sums, new)
    usable = jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in following]))
    sums = jax.tree.map(lambda old, new: jnp.where(usable, new, old), sums, following)
    return _linear(window.features, weights), _linear(window.final_features, weights), sums


def _sums_of_steps(window: Window, discount, trace):
    """The `LeastSquares` of one rollout."""
    x, final_x = map(with_constant, window[:2])
    steps = lstd_steps(window._replace(features=x, final_features=final_x), discount, trace)
    return LeastSquares(
        matrix=exact_sum("tne,tnf->ef", steps.eligibility, steps.difference),
        vector=exact_sum("tne,tn->e", steps.eligibility, steps.reward),
        square=jnp.sum(jnp.square(x), axis=(0, 1), where=steps.known[..., None]),
        number=jnp.sum(steps.known, dtype=x.dtype),
    )


def _linear(features, weights):
    """The values `w . x` of features `[..., E]`; 0 where they are not usable, as in `with_constant`."""
    features = at_least_float32(features)
    values = exact_sum("...e,e->...", features, weights[:-1]) + weights[-1]
    return jnp.where(is_usable(features), values, 0.0)


def _weights(sums: LeastSquares, ridge):
    """w `[E]`. The equations are solved for features of mean square 1, which is more accurate in float32."""
    number = jnp.maximum(sums.number, 1e-6)
    square = sums.square / number
    scale = jnp.where(square > 0, jax.lax.rsqrt(square), 0.0)
    return scale * lstd_weights(scale[:, None] * sums.matrix * scale[None], scale * sums.vector, number, ridge)


class RecursiveState(NamedTuple):
    """The state of `recursive_lstd_baseline`: all that it keeps of earlier rollouts. Zeros before the first one."""

    sums: LeastSquares
    scaling: Scaling | None  # by the first rollout; None: no random features


def recursive_lstd_baseline(
    *, features: Callable = observed, num_random_features: int | None = None, fit_every: int = 1
) -> Baseline:
    """Values linear in the observation, fitted to the earlier rollouts: `recursive_lstd_values`.

    The trace is `gae_lambda`, the ridge `value_ridge`, the decay `value_decay`.

    Args:
      features: `observed`, or others whose meaning does not change while training, such as `relative_positions`.
      num_random_features: how many `random_features` of them are added; None: `RANDOM_FEATURES` if there are at most
        `FEW_FEATURES`, and otherwise none.
      fit_every: as of `recursive_lstd_values`.
    """
    if num_random_features is not None and num_random_features < 0:
        raise ValueError(f"num_random_features={num_random_features} is no number of features; use 0 for none, or more")
    options = {"features": features, "num_random_features": num_random_features, "fit_every": fit_every}
    return Baseline(with_options(_initial_state, **options), with_options(_recursive_lstd_baseline, **options))


def _initial_state(trajectory: Trajectory, policy: Any, params: PyTree, **options: Any) -> RecursiveState:
    def state_after(trajectory, params):
        return _recursive_lstd_baseline(trajectory, None, policy, params, Hyperparams(), 1, **options)[2]

    return jax.tree.map(jnp.zeros_like, jax.eval_shape(state_after, trajectory, params))


def _recursive_lstd_baseline(
    trajectory, state: RecursiveState | None, policy, params, hyperparams: Hyperparams, group_size: int, **options: Any
) -> tuple[jax.Array, jax.Array, RecursiveState]:
    window = window_of(trajectory, *options["features"](trajectory, policy, params))
    num_random_features = options["num_random_features"]
    if num_random_features is None:
        num_random_features = RANDOM_FEATURES if window.features.shape[-1] <= FEW_FEATURES else 0
    sums, scaling = (None, None) if state is None else state
    if num_random_features:
        scaling = _first_scaling(state, scaling_of(window.features, trajectory.valid))
        features, final_features = (
            jnp.concatenate([x, random_features(x, scaling, num_random_features)], axis=-1)
            for x in map(at_least_float32, window[:2])
        )
        window = window._replace(features=features, final_features=final_features)
    fit = {"decay": hyperparams.value_decay, "fit_every": options["fit_every"]}
    *values, sums = recursive_lstd_values(sums, window, **least_squares_options(hyperparams), **fit)
    return *values, RecursiveState(sums, scaling)


def _first_scaling(state, scaling):
    """The scaling of the state if that has any rollouts, otherwise the given one: features must keep their meaning."""
    if state is None:
        return scaling
    return jax.tree.map(lambda first, now: jnp.where(state.sums.number > 0, first, now), state.scaling, scaling)

"""The kernel baseline: the value of a state is the mean return of similar states in other environments."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import broadcast_to_rank

from grpo_jax.hyperparams import NOT_NEGATIVE, Hyperparams, number
from grpo_jax.objectives.returns import bootstrapped_returns
from grpo_jax.observations import flatten_observation
from grpo_jax.precision import at_least_float32, exact_sum

FAR = 1e30  # a squared distance beyond any
CLOSEST = 1e-30  # bandwidths are no smaller


class Window(NamedTuple):
    """`T` steps of `N` environments, from which the values of their states are estimated."""

    features: jax.Array  # [T, N, ...] of each state, any dtype
    final_features: jax.Array  # [F, N, ...] of the observations that no step starts from (see `next_values`)
    rewards: jax.Array  # [T, N]
    terminated: jax.Array  # [T, N] bool
    truncated: jax.Array  # [T, N] bool
    mask: jax.Array  # [T, N], true on the valid steps


class KernelHyperparams(Hyperparams):
    """With the number of `kernel_baseline`."""

    kernel_bandwidth: float = number(0.2, NOT_NEGATIVE)
    """Squared distance of two states, relative to the mean one, at which a kernel baseline's weight falls to 1/e."""


def kernel_values(
    window: Window,
    *,
    discount: float,
    bandwidth: float,
    relative: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Values of states as means of the returns of other rollouts, weighted by similarity.

        V(x_t^i) = sum_{j != i} w_j R_t^j,  w = softmax(-||x_t^i - x_t^j||^2 / bandwidth)

    R are discounted returns-to-go, bootstrapped where a limit or the window cut them. The value of such a final state
    is found in the same way, among all steps of the first half of the window, whose returns are bootstrapped in the
    same way: two iterations from 0. A rollout's values use only other rollouts. (Its own rewards leak in slightly,
    through their bootstrapped ends.) Kernelised advantage estimation is related (https://arxiv.org/abs/2604.28005).

    Args:
      window: its features are what states are compared by.
      discount: in [0, 1].
      bandwidth: squared distance at which a weight falls to 1/e. At 0 the nearest counts alone, at infinity all alike.
      relative: the bandwidth is in units of the mean squared distance of two states of the batch. Static.

    Returns:
      Values `[T, N]` and `[F, N]`, in the units of the returns; 0 where there is no other state to compare with. A
      state that is not finite, or whose square is not, counts as not valid, and its value is 0. With `relative` a
      rollout also enters its own values through the scale.
    """
    features, final_features, rewards, terminated, truncated, mask = window
    (num_steps, num_envs), num_finals = rewards.shape, len(final_features)
    rewards = at_least_float32(rewards)
    features, final_features = (x.reshape(*x.shape[:2], -1) for x in (features, final_features))
    comparable, finally_comparable = map(_comparable, (features, final_features))
    features = jnp.where(comparable[..., None], features, 0)
    final_features = jnp.where(finally_comparable[..., None], final_features, 0)
    mask = mask.astype(bool) & comparable
    embed, unit_bandwidth = _embedding(features, mask, relative)
    bandwidth = jnp.maximum(bandwidth * unit_bandwidth, CLOSEST)

    # return = constant + factor · final_value: compute both parts once.
    unit = jnp.broadcast_to(jnp.eye(num_finals)[..., None], (num_finals, num_finals, num_envs))
    returns_of = functools.partial(bootstrapped_returns, terminated=terminated, truncated=truncated, discount=discount)
    own_part = returns_of(rewards, jnp.zeros((num_finals, num_envs)))
    factors = jax.vmap(lambda one: returns_of(jnp.zeros_like(rewards), one))(unit)
    counted = mask & jnp.isfinite(own_part)
    terms = jnp.where(counted[..., None], jnp.stack([own_part, *factors], axis=-1), 0.0)  # [T, N, 1 + F]

    queries, first_half = embed(final_features), max(num_steps // 2, 1)
    log_weights, means = _rollout_means(queries, embed, features, terms, counted, bandwidth, first_half)
    final_values = _final_values(log_weights, means, finally_comparable)
    returns = terms[..., 0] + jnp.sum(terms[..., 1:] * final_values.T[None], axis=-1)

    not_own = ~jnp.eye(num_envs, dtype=bool)

    def value(now):
        x, returns, counted = now
        x = embed(x)
        return exact_sum("qk,k->q", _similarity(_squared_distances(x, x), not_own & counted[None], bandwidth), returns)

    values = jax.lax.map(value, (features, returns, counted))
    return jnp.where(comparable, values, 0.0), final_values


def _embedding(features, mask, relative):
    """The function from states to points `[K, E]` whose distances count, and the unit of the bandwidth."""
    origin = at_least_float32(features[0, 0])  # differences of integers stay exact
    unit = 1.0
    if relative:
        differences = at_least_float32(features) - broadcast_to_rank(origin, 3)
        unit = 2.0 * jnp.sum(jnp.var(differences, axis=(0, 1), where=mask[..., None]))

    def embed(x):
        return (at_least_float32(x) - broadcast_to_rank(origin, x.ndim)).reshape(-1, x.shape[-1])

    return embed, unit


def _final_values(log_weights, means, comparable):
    """Values `[F, N]` of final states, from the others' mean returns, which are bootstrapped with values as these."""
    num_finals, num_envs = comparable.shape
    weights = _softmax(log_weights, ~jnp.tile(jnp.eye(num_envs, dtype=bool), (num_finals, 1)))
    values = jnp.zeros((num_finals, num_envs))
    for _ in range(2):
        returns = means[..., 0] + jnp.sum(means[..., 1:] * values.T[None], axis=-1)
        values = jnp.where(comparable, jnp.sum(weights * returns, axis=1).reshape(num_finals, num_envs), 0.0)
    return values


def _rollout_means(queries, embed, features, terms, counted, bandwidth, num_steps):
    """Means over the first steps of each rollout, weighted by similarity to `queries` `[Q, E]`.

    Returns:
      The logarithm of each rollout's weight, `[Q, N]`, and the weighted means of its terms, `[Q, N, C]`.
    """

    def step(carry, now):
        nearest, total, sums = carry
        x, terms, counted = now
        distances = jnp.where(counted, _squared_distances(queries, embed(x)), FAR)
        closest = jnp.minimum(nearest, distances)
        before, here = jnp.exp((closest - nearest) / bandwidth), jnp.exp((closest - distances) / bandwidth)
        here = jnp.where(counted, here, 0.0)
        sums = sums * before[..., None] + here[..., None] * terms[None]
        return (closest, total * before + here, sums), None

    shape = (queries.shape[0], counted.shape[1])
    start = (jnp.full(shape, FAR), jnp.zeros(shape), jnp.zeros((*shape, terms.shape[-1])))
    xs = jax.tree.map(lambda leaf: leaf[:num_steps], (features, terms, counted))
    (nearest, total, sums), _ = jax.lax.scan(step, start, xs)
    nearest = nearest - jnp.min(nearest, axis=1, keepdims=True)  # large numbers over a small bandwidth overflow
    return jnp.log(total) - nearest / bandwidth, sums / jnp.maximum(total, CLOSEST)[..., None]


def _similarity(distances, allowed, bandwidth):
    """Weights `[Q, K]` of the allowed entries: rows sum to 1, or to 0 where none is allowed."""
    nearest = jnp.min(distances, axis=1, keepdims=True, where=allowed, initial=FAR)
    return _softmax((nearest - distances) / bandwidth, allowed)


def _softmax(logits, allowed):
    weights = jax.nn.softmax(jnp.where(allowed, logits, -jnp.inf), axis=1, where=allowed)
    return jnp.where(jnp.any(allowed & jnp.isfinite(logits), axis=1, keepdims=True), weights, 0.0)


def _squared_distances(a, b):
    """Between the rows of `[Q, E]` and `[K, E]`."""
    products = exact_sum("qe,ke->qk", a, b)
    return jnp.maximum(jnp.sum(a**2, axis=1)[:, None] + jnp.sum(b**2, axis=1)[None] - 2.0 * products, 0.0)


def _comparable(x):
    """`[T, N]` bool: the distances of the states `[T, N, E]` from others are finite."""
    return jnp.isfinite(jnp.sum(jnp.square(at_least_float32(x)), axis=-1))


def kernel_baseline(trajectory, policy, params, hyperparams, group_size, *, relative: bool = True):
    """The mean return-to-go of all other environments at the same step, weighted by similarity of observations.

    The bandwidth is `kernel_bandwidth` of `KernelHyperparams`, and `relative` as of `kernel_values`. Several arrays of
    an observation are flattened into one (`flatten_observation`).
    """
    if trajectory.valid.shape[1] < 2:
        raise ValueError("kernel_baseline compares environments, but there is one; use num_envs=2 or more, best 64")
    window = Window(
        *(flatten_observation(each, 2) for each in (trajectory.observation, trajectory.final_observation)),
        *(trajectory.reward, trajectory.terminated, trajectory.truncated, trajectory.valid),
    )
    scale = {"discount": hyperparams.discount, "bandwidth": hyperparams.kernel_bandwidth}
    return kernel_values(window, **scale, relative=relative)

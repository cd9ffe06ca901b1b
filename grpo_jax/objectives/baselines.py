"""Baselines: what states are worth, told by the returns of other rollouts in place of a critic.

Trajectories are time-major, `[T, N]`. A value is made of the returns of other rollouts, so that the policy gradient
stays unbiased when it is subtracted; what `kernel_values` says of exceptions. Steps that are not valid, and those whose
return is not finite, tell nothing about others.

Numbers may be of any type; half precision, integers and booleans are computed with as `precision` says.
"""

import functools

import jax
import jax.numpy as jnp

from grpo_jax.objectives.advantages import gae, next_values
from grpo_jax.precision import at_least_float32

FAR = 1e30  # a squared distance beyond any
CLOSEST = 1e-30  # bandwidths are no smaller
HIGHEST = jax.lax.Precision.HIGHEST


def bootstrapped_returns(
    rewards: jax.Array, final_values: jax.Array, terminated: jax.Array, truncated: jax.Array, *, discount: float
) -> jax.Array:
    """Discounted return-to-go of every step, continued where a limit or the window cut it by the value of what follows.

        R_t = r_t + discount (1 - terminated_t) R_{t+1},  with V(s') for R_{t+1} where truncated and at the window's end

    Args:
      rewards: `[T, N]`.
      final_values: `[F, N]`, as `advantages.next_values` takes them.
      terminated, truncated: `[T, N]` bool.
      discount: in [0, 1].

    Returns:
      `[T, N]`, in the units of the rewards.
    """
    after_window = jnp.broadcast_to(final_values[-1], rewards.shape)
    bootstraps = next_values(after_window, final_values, truncated)
    bootstraps = jnp.where(truncated.at[-1].set(True), bootstraps, 0.0)
    nothing = jnp.zeros_like(rewards)
    return gae(rewards, nothing, bootstraps, terminated, truncated, discount=discount, gae_lambda=1.0)


def same_step_leave_one_out(returns: jax.Array, mask: jax.Array, group_size: int) -> jax.Array:
    """The mean return-to-go of the other members of the group at the same step.

        V_it = mean_{j != i, j valid at t} R_jt

    Args:
      returns: `[T, N]` returns-to-go, groups one after the other along `N`.
      mask: `[T, N]`, true on the valid steps.
      group_size: members of a group, at least 2; divides `N`. Static.

    Returns:
      `[T, N]`, in the units of the returns; exactly that of the others where they are equal, 0 where there are none.
    """
    if group_size < 2 or returns.shape[1] % group_size:
        raise ValueError(
            f"a baseline of the group's others needs groups of 2 or more that divide the {returns.shape[1]} rollouts, "
            f"and group_size is {group_size}; use group_size >= 2, or a baseline without groups: kernel_baseline"
        )
    returns = at_least_float32(returns)
    counted = (mask.astype(bool) & jnp.isfinite(returns)).reshape(returns.shape[0], -1, group_size)
    returns = jnp.where(counted, returns.reshape(counted.shape), 0.0)
    others = counted[..., None, :] & ~jnp.eye(group_size, dtype=bool)
    # Less the return of a neighbour, so that the mean of equal numbers is their number to the last bit.
    neighbour = jnp.roll(returns, -1, axis=-1)
    excess = jnp.sum(returns[..., None, :] - neighbour[..., None], axis=-1, where=others)
    number = jnp.sum(others, axis=-1)
    return jnp.where(number > 0, neighbour + excess / jnp.maximum(number, 1), 0.0).reshape(mask.shape)


# --- kernel ----------------------------------------------------------------------------------------------------------


def kernel_values(
    features: jax.Array,
    final_features: jax.Array,
    rewards: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    mask: jax.Array,
    *,
    discount: float,
    bandwidth: float,
    relative: bool = False,
    standardize: bool = False,
    reach: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Values of states as means of the returns of other rollouts, weighted by similarity.

        V(x_t^i) = sum_{j != i, |s - t| <= reach} w_sj R_s^j,  w = softmax(-||x_t^i - x_s^j||^2 / bandwidth)

    R are discounted returns-to-go, bootstrapped where a limit or the window cut them. The value of such a final state
    is found in the same way, among all steps of the first half of the window, whose returns are bootstrapped likewise:
    two iterations from 0. A rollout is compared with others alone; only through what bootstraps theirs can its own
    rewards have a part in its values, a small one. Kernelised advantage estimation is related
    (https://arxiv.org/abs/2604.28005).

    Args:
      features: `[T, N, ...]`, any dtype: what states are compared by.
      final_features: `[F, N, ...]`, of what no step begins with (see `advantages.next_values`).
      rewards: `[T, N]`.
      terminated, truncated: `[T, N]` bool.
      mask: `[T, N]`, true on the valid steps.
      discount: in [0, 1].
      bandwidth: squared distance at which a weight falls to 1/e. At 0 the nearest counts alone, at infinity all alike.
      relative: the bandwidth is in units of the mean squared distance of two states of the batch. Static.
      standardize: divide each element by its standard deviation over the batch. Static.
      reach: how many steps earlier and later the others' states may be. Static.

    Returns:
      Values `[T, N]` and `[F, N]`, in the units of the returns; 0 where there is no other to learn from. A state that
      is not finite, or whose square is not, is compared with none: its value is 0, and those of others are as if it
      were not valid. With `relative` or `standardize` a rollout has a part in its own values, through the scale alone.
    """
    (num_steps, num_envs), num_finals = rewards.shape, len(final_features)
    rewards = at_least_float32(rewards)
    features, final_features = (x.reshape(*x.shape[:2], -1) for x in (features, final_features))
    comparable, finally_comparable = map(_comparable, (features, final_features))
    features = jnp.where(comparable[..., None], features, 0)
    final_features = jnp.where(finally_comparable[..., None], final_features, 0)
    mask = mask.astype(bool) & comparable
    origin = at_least_float32(features[0, 0])  # differences of integers stay exact
    scale = 1.0
    if relative or standardize:
        variance = _variance(at_least_float32(features) - origin, mask[..., None])
        if standardize:
            scale = jnp.where(variance > 0, jax.lax.rsqrt(variance), 0.0)
        if relative:
            bandwidth = bandwidth * 2.0 * jnp.sum(variance * scale**2)
    bandwidth = jnp.maximum(bandwidth, CLOSEST)

    def embed(x):
        return ((at_least_float32(x) - origin) * scale).reshape(-1, x.shape[-1])

    # A return is linear in the final values: what it is without them, and the factor of each.
    unit = jnp.broadcast_to(jnp.eye(num_finals)[..., None], (num_finals, num_finals, num_envs))
    returns_of = functools.partial(bootstrapped_returns, terminated=terminated, truncated=truncated, discount=discount)
    own_part = returns_of(rewards, jnp.zeros((num_finals, num_envs)))
    factors = jax.vmap(lambda one: returns_of(jnp.zeros_like(rewards), one))(unit)
    counted = mask & jnp.isfinite(own_part)
    terms = jnp.where(counted[..., None], jnp.stack([own_part, *factors], axis=-1), 0.0)  # [T, N, 1 + F]

    half = max(num_steps // 2, 1)
    log_weights, means = _of_each_rollout(embed(final_features), embed, features, terms, counted, bandwidth, half)
    weights = _softmax(log_weights, ~jnp.tile(jnp.eye(num_envs, dtype=bool), (num_finals, 1)))
    final_values = jnp.zeros((num_finals, num_envs))
    for _ in range(2):
        returns = means[..., 0] + jnp.sum(means[..., 1:] * final_values.T, axis=-1)
        final_values = jnp.sum(weights * returns, axis=1).reshape(num_finals, num_envs)
        final_values = jnp.where(finally_comparable, final_values, 0.0)
    returns = terms[..., 0] + jnp.sum(terms[..., 1:] * final_values.T, axis=-1)

    padded = [jnp.pad(x, ((reach, reach), *((0, 0),) * (x.ndim - 1))) for x in (features, returns, counted)]
    not_own = jnp.tile(~jnp.eye(num_envs, dtype=bool), (1, 2 * reach + 1))

    def value(now):
        step, x = now
        others, returns, counted = jax.tree.map(
            lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, step, 2 * reach + 1), padded
        )
        weights = _similarity(_squared_distances(embed(x), embed(others)), not_own & counted.reshape(-1), bandwidth)
        return jnp.matmul(weights, returns.reshape(-1), precision=HIGHEST)

    values = jax.lax.map(value, (jnp.arange(num_steps), features))
    return jnp.where(comparable, values, 0.0), final_values


def _of_each_rollout(queries, embed, features, terms, counted, bandwidth, num_steps):
    """What the first steps of each rollout say of `queries` `[Q, E]`.

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
        sums = sums * before[..., None] + here[..., None] * terms
        return (closest, total * before + here, sums), None

    shape = (queries.shape[0], counted.shape[1])
    start = (jnp.full(shape, FAR), jnp.zeros(shape), jnp.zeros((*shape, terms.shape[-1])))
    xs = jax.tree.map(lambda leaf: leaf[:num_steps], (features, terms, counted))
    (nearest, total, sums), _ = jax.lax.scan(step, start, xs)
    nearest = nearest - jnp.min(nearest, axis=1, keepdims=True)  # large numbers over a small bandwidth overflow
    return jnp.log(total) - nearest / bandwidth, sums / jnp.maximum(total, CLOSEST)[..., None]


def _similarity(distances, allowed, bandwidth):
    """Weights of what is allowed, `[Q, K]`: rows sum to 1, or to 0 where nothing is."""
    nearest = jnp.min(distances, axis=1, keepdims=True, where=allowed, initial=FAR)
    return _softmax((nearest - distances) / bandwidth, allowed)


def _softmax(logits, allowed):
    weights = jax.nn.softmax(jnp.where(allowed, logits, -jnp.inf), axis=1, where=allowed)
    return jnp.where(jnp.any(allowed & jnp.isfinite(logits), axis=1, keepdims=True), weights, 0.0)


def _squared_distances(a, b):
    """Between the rows of `[Q, E]` and `[K, E]`."""
    products = jnp.matmul(a, b.T, precision=HIGHEST)
    return jnp.maximum(jnp.sum(a**2, axis=1)[:, None] + jnp.sum(b**2, axis=1) - 2.0 * products, 0.0)


def _comparable(x):
    """`[T, N]` bool: the distances of the states `[T, N, E]` from others are finite."""
    return jnp.isfinite(jnp.sum(jnp.square(at_least_float32(x)), axis=-1))


def _variance(x, valid):
    """Of each element over valid steps, `[E]`; exactly 0 for one that is 0 throughout."""
    return jnp.var(x, axis=(0, 1), where=valid)


# --- state hash ------------------------------------------------------------------------------------------------------


def state_hash_values(
    observation: jax.Array,
    final_observation: jax.Array,
    returns: jax.Array,
    mask: jax.Array,
    fallback: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The mean return-to-go of other rollouts' visits to the same state, known by the bits of its observation.

        V(s_t^i) = mean {R_u^j : s_u^j = s_t^i, j != i}

    The anchor states of GiGPO (https://arxiv.org/abs/2505.10978), among all rollouts; R_u^j may be of any step u. Final
    states are valued by visits in the first half of the window, whose returns are longer. Two states are the same if
    64 bits of hash are.

    Args:
      observation: `[T, N, ...]`.
      final_observation: `[F, N, ...]`, of what no step begins with (see `advantages.next_values`).
      returns: `[T, N]` returns-to-go.
      mask: `[T, N]`, true on the valid steps.
      fallback: `[T, N]`, the value where no other rollout came by.

    Returns:
      Values `[T, N]` and `[F, N]`, in the units of the returns; final ones are 0 where no other rollout came by.
    """
    returns, fallback = at_least_float32(returns), at_least_float32(fallback)
    num_steps, num_envs = returns.shape
    everything = jnp.concatenate([observation, final_observation])
    shape = everything.shape[:2]
    env = jnp.broadcast_to(jnp.arange(num_envs), shape).reshape(-1)
    states, visitors = _same(*_hashes(everything.reshape(env.size, -1)), env)
    counted = mask.astype(bool) & jnp.isfinite(returns)
    centre = jnp.mean(returns, where=counted)
    centre = jnp.where(jnp.isfinite(centre), centre, 0.0)  # sums over many visits are then of small numbers
    excess = jnp.where(counted, returns - centre, 0.0)

    def mean_of_others(counted):
        late = ((0, shape[0] - num_steps), (0, 0))
        numbers = [jnp.pad(x, late).reshape(-1) for x in (jnp.where(counted, excess, 0.0), counted.astype(jnp.float32))]

        def others(x):
            of_all, own = (jax.ops.segment_sum(x, ids, env.size)[ids] for ids in (states, visitors))
            return (of_all - own).reshape(shape)

        total, visits = map(others, numbers)
        return visits > 0, centre + total / jnp.maximum(visits, 1)

    found, values = (x[:num_steps] for x in mean_of_others(counted))
    first_half = jnp.arange(num_steps)[:, None] < max(num_steps // 2, 1)
    found_finally, final_values = (x[num_steps:] for x in mean_of_others(counted & first_half))
    return jnp.where(found, values, fallback), jnp.where(found_finally, final_values, 0.0)


def _hashes(x):
    """Two hashes of each row of `[M, E]`, uint32 `[M]`, by all of its bits but the sign of a zero."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = jnp.where(x == 0, 0.0, at_least_float32(x))
    elif x.dtype.itemsize < 4:
        x = x.astype(jnp.uint32)
    words = jax.lax.bitcast_convert_type(x, jnp.uint32).reshape(x.shape[0], -1)
    place = jnp.arange(words.shape[1], dtype=jnp.uint32)
    salts = [_mixed(place + jnp.uint32(offset)) for offset in (0x9E3779B9, 0x3C6EF372)]
    return [jnp.sum(_mixed(words ^ salt), axis=1, dtype=jnp.uint32) for salt in salts]


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

"""Distributions of actions: values in float64, frequencies of samples, actions of probability 0 and saturated ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from compilation import compiled
from jax.test_util import check_grads

from grpo_jax.environments.spaces import Box
from grpo_jax.policies import categorical, diagonal_gaussian, distributions, make_distribution, multi_categorical
from grpo_jax.policies.distributions import LOG_STD_RANGE

INF = np.inf
discrete = compiled(categorical(4))
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(0, 2, (5, 3, 6)).astype(np.float32)
OTHER = RNG.normal(0, 2, (5, 3, 6)).astype(np.float32)
IMPOSSIBLE = [-INF, 0.3, -0.2, 1.0], [0.3, -INF, -0.2, 1.0], [0.3, -0.2, 1.0, -INF], [-INF, -INF, 0.0, -INF]


def log_softmax(logits):
    shifted = np.asarray(logits, np.float64) - np.max(logits, axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def draws(logits, number, seed=0):
    logits = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (number, len(logits)))
    return np.asarray(discrete.sample(logits, jax.random.key(seed)))


def test_actions_occur_as_often_as_they_should():
    number = 40_000
    # The limit is the 99.9% quantile of the chi-square distribution with as many degrees of freedom.
    for logits, limit in (([0.0, 0.0], 10.83), (list(LOGITS[0, 0]), 20.52), ([-INF, 2.0, -INF, 1.0, 0.0], 13.82)):
        counts = np.bincount(draws(logits, number), minlength=len(logits))
        expected = number * np.exp(log_softmax(logits))
        possible = expected > 0
        assert np.sum((counts - expected)[possible] ** 2 / expected[possible]) < limit


def test_each_draw_of_a_batch_has_its_own_distribution():
    logits = np.full((50, 7, 4), -INF, np.float32)
    only = RNG.integers(0, 4, (50, 7))
    np.put_along_axis(logits, only[..., None], 0.0, axis=-1)
    actions = discrete.sample(jnp.asarray(logits), jax.random.key(0))
    assert np.array_equal(actions, only) and np.array_equal(discrete.mode(logits), only)
    assert actions.dtype == jnp.int32
    assert not discrete.entropy(logits).any()


@pytest.mark.parametrize("logits", IMPOSSIBLE, ids=["first", "middle", "last", "all but one"])
def test_an_impossible_action_never_occurs_and_adds_nothing(logits):
    assert not np.isneginf(np.array(logits)[draws(logits, 200_000)]).any()
    ours, theirs = np.float32(logits), np.float32(logits) + np.float32([0.1, 0.2, 0.3, 0.4])
    action, possible = np.argmax(ours), ~np.isneginf(logits)
    functions = {
        "log_prob": lambda x: discrete.log_prob(x, action),
        "entropy": discrete.entropy,
        "kl": lambda x: discrete.kl(x, theirs),
        "kl reversed": lambda x: discrete.kl(theirs, x),
    }
    values = jax.jit(lambda x: {name: jax.value_and_grad(function)(x) for name, function in functions.items()})(ours)
    reference, moved = log_softmax(ours[possible]), log_softmax(theirs[possible])
    np.testing.assert_allclose(values["entropy"][0], -np.sum(np.exp(reference) * reference), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(values["kl"][0], np.sum(np.exp(reference) * (reference - moved)), rtol=1e-5, atol=1e-7)
    for _, gradient in values.values():
        assert np.isfinite(gradient).all() and not np.asarray(gradient)[~possible].any()


@pytest.mark.parametrize("num_actions, share", [(362, 0.1), (4672, 0.02)])
def test_nor_where_sums_of_many_probabilities_round(num_actions, share):
    """Draws at the ends of actions: a parallel sum over runs of zeros falls and rises there by some ulp."""
    rng = np.random.default_rng(3)
    legal = (rng.random(num_actions) < share) & (np.arange(num_actions) % (num_actions - 1) > 0)  # not the outer ones
    logits = np.where(legal, rng.normal(0, 1, num_actions), -INF)
    ends = np.cumsum(np.exp(log_softmax(logits)))[legal][-100:]  # where sums are largest
    uniform = np.round(ends[:, None] * 2**23) / 2**23 + np.arange(-4, 5) * 2.0**-23
    uniform = jnp.asarray([0.0, 1 - 2**-24, *np.clip(uniform, 0, 1 - 2**-23).ravel()], jnp.float32)
    one = jnp.asarray(logits, jnp.float32)
    alike = jax.jit(jax.vmap(discrete.from_noise, in_axes=(None, 0)))(one, uniform)
    few = uniform[::25]
    batch = jax.jit(discrete.from_noise)(jnp.broadcast_to(one, (len(few), num_actions)), few)
    assert legal[alike].all() and legal[batch].all()


@pytest.mark.parametrize("num_actions", [1, 2, 3, 6])
def test_an_accelerator_samples_few_actions_without_reductions_and_as_in_float64(num_actions):
    rng = np.random.default_rng(num_actions)
    logits = rng.normal(0, 2, (20_000, num_actions)).astype(np.float32)
    possible = rng.integers(0, num_actions, (20_000, 1))
    logits[(rng.random(logits.shape) < 0.3) & (np.arange(num_actions) != possible)] = -INF
    uniform = rng.random(20_000, np.float32)
    uniform[:2000], uniform[2000:4000] = 0.0, 1 - 2.0**-24
    ends = np.cumsum(np.exp(log_softmax(logits)), axis=-1)
    expected = np.argmax((ends > uniform[:, None]) & ~np.isneginf(logits), axis=-1)
    between = (np.abs(ends - uniform[:, None]) > 1e-6).all(-1)  # no rounding decides
    for is_double in (False, True):
        with jax.enable_x64(is_double):
            actions = np.asarray(jax.jit(distributions._by_columns)(logits, uniform))
        assert actions.dtype == np.int32 and np.array_equal(actions[between], expected[between])
        assert not np.isneginf(np.take_along_axis(logits, actions[:, None], axis=-1)).any()
    for platform, size in [("cuda", num_actions), ("cpu", num_actions), ("cuda", 18)]:
        shapes = jax.ShapeDtypeStruct((8, size), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.float32)
        text = jax.jit(categorical(size).from_noise).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()
        assert ("reduce" in text) == (platform == "cpu" or size == 18)


def test_the_log_probability_of_an_unknown_action_is_nan():
    for family in (discrete, compiled(multi_categorical((2, 3)))):
        logits = np.zeros((4, family.num_parameters), np.float32)
        action = np.full(family.noise(jax.random.key(0), (4,)).shape, 1)
        action[0], action[1] = -1, 6
        assert np.array_equal(np.isnan(family.log_prob(logits, action)), [True, True, False, False])


def test_values_agree_with_float64():
    log_p, log_q = log_softmax(LOGITS), log_softmax(OTHER)
    action = RNG.integers(0, 6, LOGITS.shape[:-1])
    chosen = np.take_along_axis(log_p, action[..., None], -1)[..., 0]
    expected = {
        "log_prob": (discrete.log_prob(LOGITS, jnp.asarray(action)), chosen),
        "entropy": (discrete.entropy(LOGITS), -np.sum(np.exp(log_p) * log_p, -1)),
        "kl": (discrete.kl(LOGITS, OTHER), np.sum(np.exp(log_p) * (log_p - log_q), -1)),
    }
    for name, (actual, value) in expected.items():
        assert actual.shape == (5, 3)
        np.testing.assert_allclose(actual, value, rtol=2e-6, atol=2e-6, err_msg=name)
    np.testing.assert_allclose(discrete.entropy(jnp.zeros((1, 6))), np.log(6), rtol=1e-6)
    np.testing.assert_allclose(discrete.kl(LOGITS, LOGITS), 0.0, atol=1e-6)


def test_gradients_are_those_of_finite_differences():
    other = OTHER[0, 1]
    for function in (discrete.entropy, lambda x: discrete.kl(x, other), lambda x: discrete.kl(other, x)):
        check_grads(jax.jit(function), (LOGITS[0, 0],), order=1, modes=["rev"], rtol=2e-2, atol=2e-3)


def test_large_logits_do_not_overflow():
    logits = jnp.array([1e4, 0.0, -1e4])
    values = [f(logits) for f in (discrete.entropy, lambda x: discrete.kl(x, x), discrete.mode)]
    values += [discrete.log_prob(logits, jnp.int32(0)), discrete.sample(logits, jax.random.key(0))]
    assert values == [0.0, 0.0, 0, 0.0, 0]


SIZES = (2, 3, 4)
several = compiled(multi_categorical(SIZES))


def test_several_dimensions_are_independent_ones_also_with_impossible_actions():
    logits, other = LOGITS[..., [0, 1, 2, 3, 4, 5, 0, 2, 4]], OTHER[..., [5, 4, 3, 2, 1, 0, 1, 3, 5]]
    logits[..., [0, 3]] = other[..., [0, 3]] = -INF
    parts = [(logits[..., a:b], other[..., a:b]) for a, b in [(0, 2), (2, 5), (5, 9)]]
    action = several.sample(logits, jax.random.key(0))
    assert several.num_parameters == 9 and action.shape == (5, 3, 3) and action.dtype == jnp.int32
    assert (action[..., 0] == 1).all() and (action[..., 1] != 1).all()
    assert np.array_equal(several.mode(logits), np.stack([discrete.mode(p) for p, _ in parts], -1))
    expected = {
        "log_prob": (several.log_prob(logits, action), lambda d, p, q: discrete.log_prob(p, action[..., d])),
        "entropy": (several.entropy(logits), lambda d, p, q: discrete.entropy(p)),
        "kl": (several.kl(logits, other), lambda d, p, q: discrete.kl(p, q)),
    }
    for name, (actual, function) in expected.items():
        total = sum(function(d, *pair) for d, pair in enumerate(parts))
        np.testing.assert_allclose(actual, total, atol=1e-5, err_msg=name)


LOW, HIGH = (-2.0, 0.0, -1.0), (2.0, 0.5, 3.0)
FAMILY = compiled(diagonal_gaussian(LOW, HIGH))
REAL = RNG.normal(0, 0.5, (4, 6)).astype(np.float32)
MOVED = RNG.normal(0, 0.5, (4, 6)).astype(np.float32)


def test_real_actions_have_the_numbers_of_scipy():
    (mean, log_std), scale = np.split(np.float64(REAL), 2, axis=-1), np.log(np.subtract(HIGH, LOW) / 2)
    normal, action = scipy.stats.norm(mean, np.exp(log_std)), RNG.normal(0, 1, (4, 3)).astype(np.float32)
    np.testing.assert_allclose(FAMILY.log_prob(REAL, action), (normal.logpdf(action) - scale).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(FAMILY.entropy(REAL), (normal.entropy() + scale).sum(-1), rtol=1e-5)
    for other in (MOVED, REAL + np.float32(1e-3)):  # the divergence of a small step is not rounded away
        other_mean, other_log_std = np.split(np.float64(other), 2, axis=-1)
        ratio, distance = np.exp(2 * (log_std - other_log_std)), ((mean - other_mean) / np.exp(other_log_std)) ** 2
        expected = 0.5 * np.sum(ratio - 1 - np.log(ratio) + distance, axis=-1)
        np.testing.assert_allclose(FAMILY.kl(REAL, other), expected, rtol=2e-3)
    draws = np.asarray(FAMILY.sample(jnp.broadcast_to(REAL, (100_000, 4, 6)), jax.random.key(0)), np.float64)
    assert (np.abs(draws.mean(0) - mean) < 4 * normal.std() / 100_000**0.5).all()
    np.testing.assert_allclose(draws.std(0), normal.std(), rtol=0.01)


def test_actions_stay_within_the_bounds_and_without_bounds_are_neither_scaled_nor_clipped():
    far = jnp.array([[-100.0] * 3, [0.0] * 3, [100.0] * 3])
    np.testing.assert_array_equal(FAMILY.to_environment(far), np.float32([LOW, np.add(LOW, HIGH) / 2, HIGH]))
    family = make_distribution(Box((-np.inf, -4.0, 3.0, -3.4e38), (np.inf, 2.0, np.inf, 3.4e38)))
    assert family.to_environment(jnp.zeros(4)).tolist() == [0.0, -1.0, 3.0, 0.0]
    assert family.to_environment(jnp.full(4, 0.5)).tolist() == [0.5, 0.5, 3.5, 0.5]
    assert family.to_environment(jnp.full(4, 1e6)).tolist() == [1e6, 2.0, 1e6 + 3, 1e6]


def test_an_initial_policy_covers_the_bounds():
    low, high = np.float32((-0.1, 100.0)), np.float32((0.1, 500.0))
    family = compiled(diagonal_gaussian(tuple(low), tuple(high)))
    parameters = jnp.zeros((20_000, 4))
    action = np.asarray(family.to_environment(family.sample(parameters, jax.random.key(0))))
    np.testing.assert_allclose(np.mean((action > low) & (action < high), axis=0), 0.683, atol=0.015)
    np.testing.assert_allclose(np.mean((action - low) / (high - low), axis=0), 0.5, atol=0.01)


def test_values_and_gradients_are_finite_at_saturated_actions():
    @jax.jit
    def differentiated(parameters, u):
        functions = (
            lambda p: FAMILY.log_prob(p, jnp.full(3, u)),
            FAMILY.entropy,
            lambda p: FAMILY.kl(p, jnp.zeros(6)),
            lambda p: FAMILY.kl(jnp.zeros(6), p),
            lambda p: FAMILY.log_prob(parameters, jnp.full(3, u) + p[:3]),
            lambda p: FAMILY.to_environment(p[:3]).sum(),
        )
        return [jax.value_and_grad(function)(parameters) for function in functions]

    with jax.debug_nans(True):
        for u in (20.0, -20.0, 100.0, -100.0):
            for mean, log_std in [(0.0, -1.0), (u, 0.0), (0.0, -50.0), (u, 50.0)]:
                for i, results in enumerate(differentiated(np.float32([mean] * 3 + [log_std] * 3), u)):
                    assert all(np.isfinite(leaf).all() for leaf in results), (i, u, mean, log_std)


def test_deviations_are_free_parameters_of_a_range():
    assert (FAMILY.num_parameters, FAMILY.num_free) == (6, 3)
    slopes = jax.jit(jax.grad(FAMILY.entropy))
    for log_std, slope in ((LOG_STD_RANGE[0] - 1, 0.0), (0.0, 1.0), (LOG_STD_RANGE[1] + 1, 0.0)):
        assert slopes(jnp.array([0.0] * 3 + [log_std] * 3)).tolist() == [0.0] * 3 + [slope] * 3

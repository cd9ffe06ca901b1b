"""Discrete distributions: values against NumPy in float64, frequencies of samples, actions of probability 0."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilation import compiled
from jax.test_util import check_grads

from grpo_jax.environments.spaces import Box, Discrete, MultiDiscrete
from grpo_jax.policies import distributions

INF = np.inf
categorical = compiled(distributions.categorical(4))
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(0, 2, (5, 3, 6)).astype(np.float32)
OTHER = RNG.normal(0, 2, (5, 3, 6)).astype(np.float32)
IMPOSSIBLE = {
    "first": [-INF, 0.3, -0.2, 1.0],
    "middle": [0.3, -INF, -0.2, 1.0],
    "last": [0.3, -0.2, 1.0, -INF],
    "all but one": [-INF, -INF, 0.0, -INF],
}


def log_softmax(logits):
    shifted = np.asarray(logits, np.float64) - np.max(logits, axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def draws(logits, number, seed=0):
    logits = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (number, len(logits)))
    return np.asarray(categorical.sample(logits, jax.random.key(seed)))


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
    actions = categorical.sample(jnp.asarray(logits), jax.random.key(0))
    assert np.array_equal(actions, only) and np.array_equal(categorical.mode(logits), only)
    assert actions.dtype == jnp.int32
    assert not categorical.entropy(logits).any()


@pytest.mark.parametrize("logits", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_an_impossible_action_never_occurs_and_adds_nothing(logits):
    assert not np.isneginf(np.array(logits)[draws(logits, 200_000)]).any()
    ours, theirs = np.float32(logits), np.float32(logits) + np.float32([0.1, 0.2, 0.3, 0.4])
    action, possible = np.argmax(ours), ~np.isneginf(logits)
    functions = {
        "log_prob": lambda x: categorical.log_prob(x, action),
        "entropy": categorical.entropy,
        "kl": lambda x: categorical.kl(x, theirs),
        "kl reversed": lambda x: categorical.kl(theirs, x),
    }
    values = jax.jit(lambda x: {name: jax.value_and_grad(function)(x) for name, function in functions.items()})(ours)
    reference, moved = log_softmax(ours[possible]), log_softmax(theirs[possible])
    np.testing.assert_allclose(values["entropy"][0], -np.sum(np.exp(reference) * reference), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(values["kl"][0], np.sum(np.exp(reference) * (reference - moved)), rtol=1e-5, atol=1e-7)
    for _, gradient in values.values():
        assert np.isfinite(gradient).all() and not np.asarray(gradient)[~possible].any()


def test_not_even_at_the_ends_of_the_unit_interval():
    for num_actions in (2, 17, 256):
        logits = RNG.normal(0, 2, (2000, num_actions)).astype(np.float32)
        for column in (0, num_actions // 2, num_actions - 1):
            masked = logits.copy()
            masked[:, column] = -INF
            for uniform in (0.0, 0.5, 1 - 2**-24):
                actions = np.asarray(categorical.from_noise(masked, np.full(2000, uniform, np.float32)))
                assert not (actions == column).any(), uniform


@pytest.mark.parametrize(
    "num_actions, share", [(362, 0.1), (4672, 0.02), pytest.param(50_000, 0.01, marks=pytest.mark.slow)]
)
def test_nor_where_sums_of_many_probabilities_round(num_actions, share):
    """Draws at the ends of actions: a parallel sum over runs of zeros falls and rises there by some ulp."""
    rng = np.random.default_rng(3)
    legal = rng.random(num_actions) < share
    logits = np.where(legal, rng.normal(0, 1, num_actions), -INF)
    ends = np.cumsum(np.exp(log_softmax(logits)))[legal][-100:]  # where sums are largest
    uniform = np.round(ends[:, None] * 2**23) / 2**23 + np.arange(-4, 5) * 2.0**-23
    uniform = jnp.asarray(np.clip(uniform, 0, 1 - 2**-23).ravel(), jnp.float32)
    one = jnp.asarray(logits, jnp.float32)
    alike = jax.jit(jax.vmap(categorical.from_noise, in_axes=(None, 0)))(one, uniform)
    few = uniform[::25]
    batch = jax.jit(categorical.from_noise)(jnp.broadcast_to(one, (len(few), num_actions)), few)
    assert legal[alike].all() and legal[batch].all()


def test_the_log_probability_of_an_unknown_action_is_nan():
    for family in (categorical, distributions.multi_categorical((2, 3))):
        logits = np.zeros((4, family.num_parameters), np.float32)
        action = np.full(family.noise(jax.random.key(0), (4,)).shape, 1)
        action[0], action[1] = -1, 6
        assert np.array_equal(np.isnan(family.log_prob(logits, action)), [True, True, False, False])


def test_values_agree_with_float64():
    log_p, log_q = log_softmax(LOGITS), log_softmax(OTHER)
    action = RNG.integers(0, 6, LOGITS.shape[:-1])
    chosen = np.take_along_axis(log_p, action[..., None], -1)[..., 0]
    expected = {
        "log_prob": (categorical.log_prob(LOGITS, jnp.asarray(action)), chosen),
        "entropy": (categorical.entropy(LOGITS), -np.sum(np.exp(log_p) * log_p, -1)),
        "kl": (categorical.kl(LOGITS, OTHER), np.sum(np.exp(log_p) * (log_p - log_q), -1)),
    }
    for name, (actual, value) in expected.items():
        assert actual.shape == (5, 3)
        np.testing.assert_allclose(actual, value, rtol=2e-6, atol=2e-6, err_msg=name)
    np.testing.assert_allclose(categorical.entropy(jnp.zeros((1, 6))), np.log(6), rtol=1e-6)
    np.testing.assert_allclose(categorical.kl(LOGITS, LOGITS), 0.0, atol=1e-6)


def test_gradients_are_those_of_finite_differences():
    other = OTHER[0, 1]
    for function in (categorical.entropy, lambda x: categorical.kl(x, other), lambda x: categorical.kl(other, x)):
        check_grads(jax.jit(function), (LOGITS[0, 0],), order=1, modes=["rev"], rtol=2e-2, atol=2e-3)


def test_large_logits_do_not_overflow():
    logits = jnp.array([1e4, 0.0, -1e4])
    values = [f(logits) for f in (categorical.entropy, lambda x: categorical.kl(x, x), categorical.mode)]
    values += [categorical.log_prob(logits, jnp.int32(0)), categorical.sample(logits, jax.random.key(0))]
    assert values == [0.0, 0.0, 0, 0.0, 0]


# --- several dimensions, and the choice of a family ------------------------------------------------------------------

SIZES = (2, 3, 4)
several = compiled(distributions.multi_categorical(SIZES))


def test_several_dimensions_are_independent_ones():
    logits, other = LOGITS[..., [0, 1, 2, 3, 4, 5, 0, 2, 4]], OTHER[..., [5, 4, 3, 2, 1, 0, 1, 3, 5]]
    parts = [(logits[..., a:b], other[..., a:b]) for a, b in [(0, 2), (2, 5), (5, 9)]]
    action = several.sample(logits, jax.random.key(0))
    assert several.num_parameters == 9 and action.shape == (5, 3, 3) and action.dtype == jnp.int32
    assert np.array_equal(several.mode(logits), np.stack([categorical.mode(p) for p, _ in parts], -1))
    expected = {
        "log_prob": (several.log_prob(logits, action), lambda d, p, q: categorical.log_prob(p, action[..., d])),
        "entropy": (several.entropy(logits), lambda d, p, q: categorical.entropy(p)),
        "kl": (several.kl(logits, other), lambda d, p, q: categorical.kl(p, q)),
    }
    for name, (actual, function) in expected.items():
        total = sum(function(d, *pair) for d, pair in enumerate(parts))
        np.testing.assert_allclose(actual, total, atol=1e-5, err_msg=name)


def test_impossible_actions_of_one_dimension_add_nothing():
    logits = jnp.asarray([-INF, 0.5, 0.1, -INF, 0.3, -INF, -INF, 0.2, 0.0])
    actions = np.asarray(several.sample(jnp.broadcast_to(logits, (20_000, 9)), jax.random.key(0)))
    assert [sorted(set(column.tolist())) for column in actions.T] == [[1], [0, 2], [2, 3]]
    with jax.debug_nans(True):
        log_prob, kl = (lambda x: several.log_prob(x, actions[0])), (lambda x: several.kl(x, logits + 0.1))
        functions = several.entropy, log_prob, kl
        results = jax.jit(lambda x: [jax.value_and_grad(function)(x) for function in functions])(logits)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(results))


def test_auto_chooses_a_family_for_each_space():
    cases = {Discrete(4): (4, 0), MultiDiscrete(SIZES): (9, 0), Box((-1.0, -1.0), (1.0, 1.0)): (4, 2)}
    for space, sizes in cases.items():
        family = distributions.make_distribution(space)
        assert (family.num_parameters, family.num_free) == sizes

"""Divergences: unbiasedness, gradients, exactness at masked actions, and the controllers of the coefficient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from grpo_jax import objectives

POLICY = jnp.asarray([0.5, -0.3, 0.1, 1.2, -1.0])
REFERENCE = jnp.asarray([0.1, 0.2, -0.4, 0.9, -0.2])
ESTIMATES = [objectives.k1, objectives.k2, objectives.k3, objectives.abs_k1, objectives.k2_straight_through]


def log_probs(logits):
    return jax.nn.log_softmax(logits)


def draws(number=1_000_000):
    actions = jax.random.categorical(jax.random.key(0), POLICY, shape=(number,))
    return log_probs(POLICY)[actions], log_probs(REFERENCE)[actions]


@pytest.mark.parametrize("estimate", [objectives.k1, objectives.k3], ids=lambda f: f.__name__)
def test_estimates_are_unbiased(estimate):
    samples = np.asarray(jax.jit(estimate)(*draws()), np.float64)
    expected = float(objectives.exact(log_probs(POLICY), log_probs(REFERENCE)))
    assert expected > 0.05
    assert abs(samples.mean() - expected) < 3 * samples.std() / np.sqrt(samples.size)


def test_k2_is_the_f_divergence_it_claims_to_be():
    # k2 is biased as an estimate of the KL: what it is unbiased for is half the mean squared log-ratio.
    samples = np.asarray(jax.jit(objectives.k2)(*draws()), np.float64)
    p, q = (np.asarray(log_probs(x), np.float64) for x in (POLICY, REFERENCE))
    assert abs(samples.mean() - np.sum(np.exp(p) * (p - q) ** 2) / 2) < 3 * samples.std() / np.sqrt(samples.size)


def test_all_three_agree_with_the_exact_kl_for_close_policies():
    reference = POLICY + 0.02 * (REFERENCE - POLICY)
    actions = jax.random.categorical(jax.random.key(1), POLICY, shape=(1_000_000,))
    log_prob, reference_log_prob = log_probs(POLICY)[actions], log_probs(reference)[actions]
    expected = float(objectives.exact(log_probs(POLICY), log_probs(reference)))
    for estimate in (objectives.k1, objectives.k2, objectives.k3):
        samples = np.asarray(estimate(log_prob, reference_log_prob), np.float64)
        assert abs(samples.mean() - expected) < 3 * samples.std() / np.sqrt(samples.size)


def exact_reverse(log_probs, reference_log_probs):
    return objectives.exact(reference_log_probs, log_probs)


@pytest.mark.parametrize(
    "estimate, gradient_of",
    [
        (objectives.k1, None),
        (objectives.k2, objectives.exact),
        (objectives.k2_straight_through, objectives.exact),
        (objectives.k3, exact_reverse),
    ],
    ids=lambda f: getattr(f, "__name__", "nothing"),
)
def test_expected_gradient_on_policy(estimate, gradient_of):
    # Exactly, by summing over the actions with the weights of the sampling policy, which are constants.
    def loss(logits):
        values = estimate(log_probs(logits), log_probs(REFERENCE))
        return jnp.sum(jax.lax.stop_gradient(jnp.exp(log_probs(logits))) * values)

    def divergence(logits):
        return gradient_of(log_probs(logits), log_probs(REFERENCE))

    expected = jnp.zeros_like(POLICY) if gradient_of is None else jax.grad(divergence)(POLICY)
    np.testing.assert_allclose(jax.grad(loss)(POLICY), expected, atol=1e-6)


def test_k3_from_behaviour_is_unbiased_in_value_and_gradient():
    # Exactly, by summing over the actions with the weights of the behaviour policy.
    behaviour = log_probs(REFERENCE)

    def loss(logits):
        return jnp.sum(jnp.exp(behaviour) * objectives.k3_from_behaviour(behaviour, log_probs(logits)))

    def divergence(logits):
        return objectives.exact(behaviour, log_probs(logits))

    for ours, expected in zip(*(jax.value_and_grad(f)(POLICY) for f in (loss, divergence)), strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-6)


def test_straight_through_has_the_value_of_k1():
    log_prob, reference = jnp.asarray([-1.0, -3.0]), jnp.asarray([-2.0, -2.5])
    np.testing.assert_allclose(objectives.k2_straight_through(log_prob, reference), [1.0, -0.5])


@pytest.mark.parametrize("estimate", ESTIMATES, ids=lambda f: f.__name__)
def test_gradients_of_estimates(estimate):
    log_prob, reference = jnp.asarray([-1.0, -0.2, -3.0]), jnp.asarray([-1.5, -0.1, -2.0])
    np.testing.assert_array_equal(jax.grad(lambda q: estimate(log_prob, q).sum())(reference), 0.0)
    value, gradient = jax.value_and_grad(lambda x: estimate(x, 0.0))(jnp.float32(100.0))
    assert np.isfinite(value) and gradient == 0.0
    value, gradient = jax.value_and_grad(lambda x: estimate(x, 0.0))(jnp.float32(-100.0))
    assert np.isfinite(value) and gradient == 0.0
    if estimate is not objectives.k2_straight_through:  # value and gradient are not each other's, by construction
        with jax.enable_x64(True):
            p, q = (jnp.asarray(np.asarray(x), jnp.float64) for x in (log_prob, reference))
            check_grads(lambda x: estimate(x, q), (p,), order=1, modes=["rev"])


def test_k3_is_accurate_and_never_negative_near_zero():
    # exp(x) - 1 - x in float32 returns multiples of 6e-8 or less than 0 here.
    log_ratio = jnp.asarray([1e-4, -1e-4, 1e-3, 0.0])
    np.testing.assert_allclose(objectives.k3(log_ratio, 0.0), [5e-9, 5e-9, 5e-7, 0.0], rtol=2e-2, atol=0)
    noise = jnp.asarray(np.random.default_rng(0).normal(0, 1e-3, 10_000), jnp.float32)
    assert np.all(objectives.k3(noise, 0.0) >= 0)


# --- exact -----------------------------------------------------------------------------------------------------------


def test_exact_by_hand():
    p, q = jnp.log(jnp.asarray([[0.5, 0.5]])), jnp.log(jnp.asarray([[0.25, 0.75]]))
    np.testing.assert_allclose(objectives.exact(p, q), [0.5 * np.log(2) + 0.5 * np.log(2 / 3)], rtol=1e-6)
    np.testing.assert_allclose(exact_reverse(p, q), [0.25 * np.log(0.5) + 0.75 * np.log(1.5)], rtol=1e-6)
    np.testing.assert_array_equal(objectives.exact(p, p), 0.0)


@pytest.mark.parametrize("divergence", [objectives.exact, exact_reverse], ids=lambda f: f.__name__)
def test_masked_actions_add_nothing(divergence):
    mask = jnp.asarray([True, False, True, True, False])

    def masked(logits):
        return log_probs(jnp.where(mask, logits, -jnp.inf))

    def among_the_rest(logits):
        return log_probs(logits[np.asarray(mask)])

    value, gradients = jax.value_and_grad(lambda p, q: divergence(masked(p), masked(q)), (0, 1))(POLICY, REFERENCE)
    np.testing.assert_allclose(value, divergence(among_the_rest(POLICY), among_the_rest(REFERENCE)), rtol=1e-6)
    for gradient in gradients:
        assert np.isfinite(gradient).all() and np.all(gradient[~np.asarray(mask)] == 0)
    # -inf in the logarithms themselves
    gradient = jax.grad(lambda p: divergence(p, masked(REFERENCE)))(masked(POLICY))
    assert np.isfinite(gradient).all() and np.all(gradient[~np.asarray(mask)] == 0)


def test_exact_where_only_one_side_is_masked():
    p, q = jnp.asarray([0.0, -jnp.inf]), jnp.log(jnp.asarray([0.5, 0.5]))
    np.testing.assert_allclose(objectives.exact(p, q), np.log(2), rtol=1e-6)
    assert exact_reverse(p, q) == np.inf


def test_exact_has_the_right_gradient():
    with jax.enable_x64(True):
        p, q = (jnp.asarray(np.asarray(x), jnp.float64) for x in (POLICY, REFERENCE))
        check_grads(lambda a, b: objectives.exact(log_probs(a), log_probs(b)), (p, q), order=2, modes=["rev"])


# --- penalty and coefficient -----------------------------------------------------------------------------------------


def test_penalized_rewards():
    rewards, kl = jnp.asarray([[1.0], [2.0], [3.0]]), jnp.asarray([[0.5], [-1.0], [jnp.nan]])
    mask = jnp.asarray([[1.0], [1.0], [0.0]])
    np.testing.assert_allclose(objectives.penalized_rewards(rewards, kl, mask, kl_coef=0.1), [[0.95], [2.1], [0.0]])
    assert jax.grad(lambda k: objectives.penalized_rewards(rewards, k, mask, kl_coef=0.1).sum())(kl)[0, 0] == 0.0


def test_adaptive_coefficient():
    def step(kl):
        return float(objectives.adaptive_coefficient(jnp.float32(0.5), jnp.float32(kl), target=0.1))

    assert step(0.1) == 0.5
    np.testing.assert_allclose([step(0.11), step(0.09)], [0.5 * 1.01, 0.5 * 0.99], rtol=1e-6)
    np.testing.assert_allclose([step(9.0), step(0.0)], [0.5 * 1.02, 0.5 * 0.98], rtol=1e-6)
    assert step(np.nan) == step(np.inf) == 0.5


def test_doubling_coefficient():
    def step(kl):
        return float(objectives.doubling_coefficient(jnp.float32(0.5), jnp.float32(kl), target=0.1))

    assert [step(kl) for kl in (0.05, 0.07, 0.14, 0.16, np.nan, np.inf)] == [0.25, 0.5, 0.5, 1.0, 0.5, 0.5]


@pytest.mark.parametrize("controller", [objectives.adaptive_coefficient, objectives.doubling_coefficient])
@pytest.mark.parametrize("target", [0.0, 1e-38, 0.01])
def test_a_coefficient_is_never_spoilt_for_ever(controller, target):
    def step(coefficient, kl):
        return controller(coefficient, kl, target=target), coefficient

    kl = jnp.concatenate([jnp.zeros(3), jnp.full(5, jnp.nan), jnp.full(5, jnp.inf), jnp.full(5000, 3e38), jnp.zeros(3)])
    last, coefficients = jax.lax.scan(step, jnp.float32(1.0), kl)
    assert np.isfinite(coefficients).all() and np.isfinite(last)
    assert last > 0


def test_adaptive_coefficient_holds_the_target():
    # A policy whose KL is inversely proportional to the coefficient settles at the target.
    def step(coefficient, _):
        return objectives.adaptive_coefficient(coefficient, 0.02 / coefficient, target=0.1), None

    coefficient, _ = jax.lax.scan(step, jnp.float32(1.0), length=300)
    np.testing.assert_allclose(0.02 / coefficient, 0.1, rtol=1e-3)


def test_exact_kl_where_a_probability_underflows():
    p, q = jnp.array([0.0, -200.0]), jnp.array([0.0, -jnp.inf])
    assert objectives.exact(p, q) == 0.0

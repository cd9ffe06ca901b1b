"""Divergences: unbiasedness, gradients, exactness at masked actions, and the controller of the coefficient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from grpo_jax import objectives

POLICY = jnp.asarray([0.5, -0.3, 0.1, 1.2, -1.0])
REFERENCE = jnp.asarray([0.1, 0.2, -0.4, 0.9, -0.2])
ESTIMATES = [objectives.k1, objectives.k2, objectives.k3, objectives.k2_straight_through]


def log_probs(logits):
    return jax.nn.log_softmax(logits)


def test_estimates_are_unbiased():
    """Exactly, by summing over the actions: of the KL; k2 of half the mean squared log-ratio."""

    @jax.jit
    def expectations(reference):
        p, q = log_probs(POLICY), log_probs(reference)
        of_estimates = [jnp.sum(jnp.exp(p) * estimate(p, q)) for estimate in ESTIMATES[:3]]
        return of_estimates, [objectives.exact(p, q), jnp.sum(jnp.exp(p) * (p - q) ** 2) / 2, objectives.exact(p, q)]

    for reference in (REFERENCE, POLICY + 0.02 * (REFERENCE - POLICY)):
        np.testing.assert_allclose(*expectations(reference), rtol=1e-3, atol=1e-8)


def exact_reverse(log_probs, reference_log_probs):
    return objectives.exact(reference_log_probs, log_probs)


def test_expected_gradients():
    """Exactly, by summing over the actions with the weights of the policy that sampled, which are constants."""
    reference = log_probs(REFERENCE)

    def loss(logits, estimate):
        p = log_probs(logits)
        return jnp.sum(jax.lax.stop_gradient(jnp.exp(p)) * estimate(p, reference))

    def divergence(logits, exact):
        return exact(log_probs(logits), reference)

    def of_behaviour(logits):
        return jnp.sum(jnp.exp(reference) * objectives.k3_from_behaviour(reference, log_probs(logits)))

    gradients_of = {
        objectives.k1: lambda p, q: 0.0 * jnp.sum(p),
        objectives.k2: objectives.exact,
        objectives.k2_straight_through: objectives.exact,
        objectives.k3: exact_reverse,
    }

    @jax.jit
    def pairs(logits):
        found = [(jax.grad(loss)(logits, f), jax.grad(divergence)(logits, g)) for f, g in gradients_of.items()]
        of_k3 = jax.value_and_grad(of_behaviour)(logits), jax.value_and_grad(divergence)(logits, exact_reverse)
        return [*found, *zip(*of_k3, strict=True)]

    for actual, expected in pairs(POLICY):
        np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize("estimate", ESTIMATES, ids=lambda f: f.__name__)
def test_gradients_of_estimates(estimate):
    log_prob, reference = jnp.asarray([-1.0, -0.2, -3.0]), jnp.asarray([-1.5, -0.1, -2.0])

    @jax.jit
    def gradients():
        far = jax.vmap(jax.value_and_grad(lambda x: estimate(x, 0.0)))(jnp.array([-100.0, 100.0]))
        return jax.grad(lambda q: estimate(log_prob, q).sum())(reference), *far

    of_reference, values, of_far = gradients()
    assert not of_reference.any() and np.isfinite(values).all() and not of_far.any()
    if estimate is not objectives.k2_straight_through:  # value and gradient are not each other's, by construction
        with jax.enable_x64(True):
            p, q = (jnp.asarray(np.asarray(x), jnp.float64) for x in (log_prob, reference))
            check_grads(jax.jit(lambda x: estimate(x, q)), (p,), order=1, modes=["rev"])


def test_k3_is_accurate_and_never_negative_near_zero():
    # exp(x) - 1 - x in float32 returns multiples of 6e-8 or less than 0 here.
    log_ratio, k3 = np.float32([1e-4, -1e-4, 1e-3, 0.0]), jax.jit(objectives.k3)
    np.testing.assert_allclose(k3(log_ratio, 0.0), [5e-9, 5e-9, 5e-7, 0.0], rtol=2e-2, atol=0)
    noise = np.random.default_rng(0).normal(0, 1e-3, 10_000).astype(np.float32)
    assert np.all(np.asarray(k3(noise, 0.0)) >= 0)


# --- exact -----------------------------------------------------------------------------------------------------------


exact = jax.jit(objectives.exact)


@pytest.mark.parametrize("divergence", [objectives.exact, exact_reverse], ids=lambda f: f.__name__)
def test_masked_actions_add_nothing(divergence):
    mask = np.asarray([True, False, True, True, False])

    def masked(logits):
        return log_probs(jnp.where(mask, logits, -jnp.inf))

    @jax.jit
    def compare(policy, reference):
        value, gradients = jax.value_and_grad(lambda p, q: divergence(masked(p), masked(q)), (0, 1))(policy, reference)
        # -inf in the logarithms themselves
        of_log_probs = jax.grad(lambda p: divergence(p, masked(reference)))(masked(policy))
        return value, (*gradients, of_log_probs), divergence(log_probs(policy[mask]), log_probs(reference[mask]))

    value, gradients, of_the_rest = compare(POLICY, REFERENCE)
    np.testing.assert_allclose(value, of_the_rest, rtol=1e-6)
    for gradient in gradients:
        assert np.isfinite(gradient).all() and not np.asarray(gradient)[~mask].any()


def test_exact_where_only_one_side_is_masked():
    p, q = np.float32([0.0, -np.inf]), np.log(np.float32([0.5, 0.5]))
    np.testing.assert_allclose(exact(p, q), np.log(2), rtol=1e-6)
    assert exact(q, p) == np.inf
    assert exact(np.float32([0.0, -200.0]), p) == exact(q, q) == 0.0, "-200 underflows"


def test_exact_has_the_right_gradient():
    with jax.enable_x64(True):
        p, q = (jnp.asarray(np.asarray(x), jnp.float64) for x in (POLICY, REFERENCE))
        of_logits = jax.jit(lambda a, b: objectives.exact(log_probs(a), log_probs(b)))
        check_grads(of_logits, (p, q), order=2, modes=["rev"])


# --- the coefficient -------------------------------------------------------------------------------------------------


def test_a_coefficient_follows_the_divergence():
    kl = jnp.array([0.1, 0.11, 0.09, 9.0, 0.0, np.nan, np.inf])
    adapted = jax.jit(lambda kl: objectives.adaptive_coefficient(jnp.full(7, 0.5), kl, target=0.1))(kl)
    np.testing.assert_allclose(adapted, 0.5 * np.array([1, 1.01, 0.99, 1.02, 0.98, 1, 1]), rtol=1e-6)
    assert adapted[0] == adapted[-2] == adapted[-1] == 0.5


def test_a_coefficient_is_never_spoilt_for_ever():
    @jax.jit
    @jax.vmap
    def history(target):
        def step(coefficient, kl):
            return objectives.adaptive_coefficient(coefficient, kl, target=target), coefficient

        return jax.lax.scan(step, jnp.float32(1.0), kl)

    kl = np.repeat(np.float32([0, np.nan, np.inf, 3e38, 0]), [3, 5, 5, 5000, 3])
    last, coefficients = history(jnp.array([0.0, 1e-38, 0.01]))
    assert np.isfinite(coefficients).all() and np.isfinite(last).all() and (last > 0).all()

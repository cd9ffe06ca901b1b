"""Distributions of real actions: densities by integration, expectations by sampling, and saturated actions."""

import jax
import jax.numpy as jnp
import numpy as np
from compilation import compiled

from grpo_jax.environments.spaces import Box
from grpo_jax.policies.distributions import LOG_STD_RANGE, diagonal_gaussian, make_distribution

LOW, HIGH = (-2.0, 0.0, -1.0), (2.0, 0.5, 3.0)
FAMILY = compiled(diagonal_gaussian(LOW, HIGH))
NUM_DRAWS = 100_000
RNG = np.random.default_rng(0)
PARAMETERS = RNG.normal(0, 0.7, (4, 6)).astype(np.float32)
OTHER = RNG.normal(0, 0.7, (4, 6)).astype(np.float32)


def expectation(function, parameters, seed=0):
    """Mean and standard error of a function of an action, by sampling."""
    repeated = jnp.broadcast_to(parameters, (NUM_DRAWS, *parameters.shape))
    values = np.asarray(function(FAMILY.sample(repeated, jax.random.key(seed))), np.float64)
    return values.mean(0), values.std(0) / np.sqrt(NUM_DRAWS)


def normal_pdf(x, mean, std):
    return np.exp(-((x - mean) ** 2) / (2 * std**2)) / (std * np.sqrt(2 * np.pi))


def test_log_prob_agrees_with_float64():
    action = RNG.normal(0, 1, (4, 3))
    mean, log_std = np.split(PARAMETERS.astype(np.float64), 2, axis=-1)
    expected = np.log(normal_pdf(action, mean, np.exp(log_std)))
    expected -= np.log((np.array(HIGH) - LOW) / 2)
    actual = FAMILY.log_prob(jnp.asarray(PARAMETERS), jnp.asarray(action, jnp.float32))
    np.testing.assert_allclose(actual, expected.sum(-1), rtol=1e-5)


def test_entropy_and_kl_equal_their_sample_means():
    parameters, other = jnp.asarray(PARAMETERS), jnp.asarray(OTHER)
    entropy, error = expectation(lambda a: -FAMILY.log_prob(parameters, a), parameters)
    assert (abs(FAMILY.entropy(parameters) - entropy) < 3 * error).all()
    kl, error = expectation(lambda a: FAMILY.log_prob(parameters, a) - FAMILY.log_prob(other, a), parameters)
    assert (abs(FAMILY.kl(parameters, other) - kl) < 3 * error).all() and (kl > 0.1).all()


def test_the_divergence_of_a_small_step_is_not_rounded_away():
    step = 1e-3
    moved = PARAMETERS + np.float32(step)
    mean, log_std, other_mean, other_log_std = (
        half for p in (PARAMETERS, moved) for half in np.split(p.astype(np.float64), 2, axis=-1)
    )
    ratio = np.exp(2 * (log_std - other_log_std))
    distance = ((mean - other_mean) / np.exp(other_log_std)) ** 2
    expected = 0.5 * np.sum(ratio - 1 - np.log(ratio) + distance, axis=-1)
    np.testing.assert_allclose(FAMILY.kl(PARAMETERS, moved), expected, rtol=2e-3)


def test_actions_stay_within_the_bounds():
    far = jnp.array([[-100.0] * 3, [-9.0] * 3, [0.0] * 3, [9.0] * 3, [100.0] * 3])
    action = np.asarray(FAMILY.to_environment(far))
    assert (action >= np.float32(LOW)).all() and (action <= np.float32(HIGH)).all()
    assert np.array_equal(action[0], np.float32(LOW)) and np.array_equal(action[-1], np.float32(HIGH))


def test_unbounded_actions_are_neither_scaled_nor_clipped():
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
    # In the environment's units: densities fall, and entropies rise, by the log of the volume.
    one = compiled(diagonal_gaussian((-1.0, -1.0), (1.0, 1.0)))
    volume = np.log(0.1 * 200.0)
    x = jnp.array([[0.3, -2.0]])
    np.testing.assert_allclose(family.log_prob(parameters, x) + volume, one.log_prob(parameters, x), rtol=1e-5)
    np.testing.assert_allclose(family.entropy(parameters[0]) - volume, one.entropy(parameters[0]), rtol=1e-5)


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

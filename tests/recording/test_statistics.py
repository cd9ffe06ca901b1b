import numpy as np
import pytest
from scipy.stats import trim_mean

from grpo_jax.commands.harness.figures import steps_to_reach
from grpo_jax.recording.statistics import bootstrap_interval, iqm, learning_curve, probability_of_improvement

IQMS = [
    ([7.0], 7.0),
    ([1.0, 2.0, 9.0], 4.0),  # fewer than four: nothing is cut
    ([100.0, 1.0, 2.0, -50.0], 1.5),
    ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 1000.0], 4.5),
    ([-9.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 99.0, 999.0], 3.5),  # 10 / 4 = 2.5: two are cut at each end
    ([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 1000.0]], 4.5),  # runs and tasks together
    ([1.0, 2.0, 3.0, np.nan], np.nan),  # a failed run shows
]


def test_iqm_is_scipys_trimmed_mean_and_numbers_by_hand():
    for scores, expected in IQMS:
        np.testing.assert_array_equal(iqm(scores), expected)
    np.testing.assert_array_equal(iqm([[1.0, np.nan], [1.0, 3.0]], axis=1), [np.nan, 2.0])
    for n in range(1, 24):
        scores = np.random.default_rng(n).standard_cauchy((5, n))
        np.testing.assert_allclose(iqm(scores, axis=1), trim_mean(scores, 0.25, axis=1), rtol=1e-12)
        np.testing.assert_allclose(iqm(scores), trim_mean(scores, 0.25, axis=None), rtol=1e-12)


def test_bootstrap_intervals():
    # Means of three draws from {0, 0, 3}: 0, 1, 2, 3 with probability 8, 12, 6, 1 of 27.
    assert bootstrap_interval([0.0, 0.0, 3.0]) == (0.0, 3.0)
    scores = np.random.default_rng(0).normal(size=16)
    low, high = bootstrap_interval(scores)
    assert low < iqm(scores) < high and (low, high) == bootstrap_interval(scores), "reproducible"
    assert bootstrap_interval([5.0]) == (5.0, 5.0) and bootstrap_interval([500.0] * 16) == (500.0, 500.0)
    assert np.isnan(bootstrap_interval([1.0, np.nan, 3.0])).all()
    for scores in ([], np.zeros((2, 2))):
        with pytest.raises(ValueError, match="not empty"):
            bootstrap_interval(scores)


def test_learning_curve_interpolates_each_seed_on_its_own_steps():
    steps, returns = [[10, 20], [20, 40], [30, 60]], [[0.0, 10.0], [10.0, 30.0], [20.0, 50.0]]
    curve = learning_curve(steps, returns, num_points=6)
    np.testing.assert_array_equal(curve.steps, [10, 20, 30, 40, 50, 60])
    # Seed 0 reads 0 10 20 and then holds 20; seed 1 holds 10, then 10 20 30 40 50.
    np.testing.assert_array_equal(curve.mean, [5, 10, 20, 25, 30, 35])
    np.testing.assert_array_equal(curve.low, [0, 10, 20, 20, 20, 20])
    np.testing.assert_array_equal(curve.high, [10, 10, 20, 30, 40, 50])


def test_learning_curve_leaves_out_padding_and_iterations_without_episodes():
    steps = [[10], [20], [30], [40], [40], [40]]
    returns = [[np.nan], [2.0], [np.nan], [4.0], [99.0], [np.nan]]
    curve = learning_curve(steps, returns, num_points=3)
    np.testing.assert_array_equal(curve.steps, [20, 30, 40])
    np.testing.assert_array_equal(curve.mean, [2, 3, 4])
    assert curve.low.tolist() == curve.high.tolist() == curve.mean.tolist()
    returns = np.tile([[1.0], [2.0]], 8)
    returns[:, 3] = -1e6  # one outlying seed
    np.testing.assert_array_equal(learning_curve(np.tile([[100], [200]], 8), returns, num_points=2).mean, [1, 2])


def test_learning_curve_of_all_episodes_of_each_part():
    """Nine short episodes and a long one are ten, in whichever iterations they end."""
    steps = [[10], [20], [30], [40], [50]]
    returns, counts = [[2.0], [30.0], [np.nan], [5.0], [7.0]], [[9], [1], [0], [1], [3]]
    curve = learning_curve(steps, returns, counts, num_points=2)
    np.testing.assert_array_equal(curve.steps, [10, 50])
    # Up to 25 (18 + 30) / 10, known at 20; up to 50 (5 + 21) / 4.
    np.testing.assert_allclose(curve.mean, [4.8, 6.5])
    one_each = learning_curve(steps, returns, counts, num_points=5)
    np.testing.assert_array_equal(one_each.mean, learning_curve(steps, returns, num_points=5).mean)


def test_learning_curve_without_returns():
    steps = [[10, 10], [20, 20]]
    curve = learning_curve(steps, np.full((2, 2), np.nan), num_points=3)
    np.testing.assert_array_equal(curve.steps, [10, 15, 20])
    assert np.isnan([curve.mean, curve.low, curve.high]).all()
    one_silent = learning_curve(steps, [[np.nan, 1.0], [np.nan, 3.0]], num_points=3)
    np.testing.assert_array_equal(one_silent.mean, [1, 2, 3])


def test_learning_curve_errors():
    for steps, returns, message in (
        (np.zeros((0, 2)), np.zeros((0, 2)), "not empty"),
        ([1, 2], [1.0, 2.0], "num_iterations, num_seeds"),
        ([[1], [2]], [[1.0]], "num_iterations, num_seeds"),
        ([[2], [1]], [[1.0], [1.0]], "cumulative"),
        ([[0], [0]], [[1.0], [1.0]], "no seed made"),
    ):
        with pytest.raises(ValueError, match=message):
            learning_curve(steps, returns)


def test_steps_to_reach_by_hand():
    steps = [[10, 10, 10], [20, 25, 20], [30, 40, 20], [40, 60, 20]]
    returns = [[1.0, 5.0, 1.0], [3.0, np.nan, 2.0], [5.0, 1.0, 9.0], [7.0, 7.0, 9.0]]
    # Seed 2 stops after 20 steps: its 9s are padding.
    np.testing.assert_array_equal(steps_to_reach(steps, returns, 4.0), [30, 10, np.inf])
    np.testing.assert_array_equal(steps_to_reach(steps, returns, 4.0, window=2), [30, 60, np.inf])
    np.testing.assert_array_equal(steps_to_reach(steps, returns, 4.0, window=3), [40, 60, np.inf])
    np.testing.assert_array_equal(steps_to_reach(steps, returns, 0.0, window=4), [40, np.inf, np.inf])
    np.testing.assert_array_equal(steps_to_reach([[5, 5]], [[np.nan, 0.0]], 0.0), [np.inf, 5])


# --- comparisons -----------------------------------------------------------------------------------------------------


def test_probability_of_improvement_by_hand():
    assert probability_of_improvement([1.0, 3.0], [2.0, 3.0])[0] == (0 + 0 + 1 + 0.5) / 4
    assert probability_of_improvement([5.0, 6.0, 7.0], [1.0, 2.0]) == (1.0, 1.0, 1.0)
    assert probability_of_improvement([2.0, 2.0], [2.0]) == (0.5, 0.5, 0.5)
    assert np.isnan(probability_of_improvement([1.0, np.nan], [2.0])).all()


def test_probability_of_improvement_has_the_interval_of_redrawn_runs():
    generator = np.random.default_rng(0)
    x, y = generator.normal(0.7, 1, 12), generator.normal(0, 1, 9)
    redrawn = [(generator.choice(x, x.size)[:, None] > generator.choice(y, y.size)).mean() for _ in range(4000)]
    probability, low, high = probability_of_improvement(x, y)
    assert low < probability == (x[:, None] > y).mean() < high
    np.testing.assert_allclose([low, high], np.quantile(redrawn, [0.025, 0.975]), atol=0.02)

"""Advantage estimators against NumPy in float64, hand-worked numbers, and the edges of their domain."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import objectives
from grpo_jax.baselines import same_state_advantage
from grpo_jax.environments import tokens

MAGNITUDES = [1e-3, 1.0, 100 / 3, 1e30]
SCORES = np.random.default_rng(0).normal(3.0, 2.0, (5, 4)).astype(np.float32)
LENGTHS = np.random.default_rng(1).integers(1, 9, (5, 4))
NAMES = "group_normalized group_centered leave_one_out pass_at_k max_rl batch_normalized"
IN_GROUPS = {name: getattr(objectives, name) for name in NAMES.split()} | {
    "decoupled_normalized": lambda r: objectives.decoupled_normalized(r[None], jnp.ones(1)),
}
OF_ONE_GROUP = IN_GROUPS | {
    "whiten": objectives.whiten,
    "process_supervised": lambda r: objectives.process_supervised(r, jnp.ones(r.shape), r.shape[1]),
    "same_state_advantage": lambda r: same_state_advantage(r, jnp.zeros(r.shape), jnp.ones(r.shape), r.shape[1]),
}
in_groups = jax.jit(lambda scores: {name: estimate(scores) for name, estimate in IN_GROUPS.items()})


def steps(lengths, num_steps=8):
    """`[T, N]`, true on the first steps of each rollout."""
    return jnp.arange(num_steps)[:, None] < jnp.asarray(lengths).reshape(1, -1)


def close(actual, expected, tolerance=2e-6):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


# --- degenerate groups -----------------------------------------------------------------------------------------------


def test_equal_scores_give_exactly_zero():
    for group_size in (4, 11):  # 11 times a float32 number, divided by 11, need not be that number
        constant = np.repeat(np.float32(MAGNITUDES)[:, None], group_size, axis=1)
        with jax.debug_nans(True):
            results = in_groups(np.concatenate([constant, SCORES.reshape(1, -1)[:, :group_size]]))
        for name, result in results.items():
            np.testing.assert_array_equal(result[:4], 0.0, err_msg=name)
            assert np.any(result[4] != 0), name


def test_scores_within_rounding_are_equal_and_others_are_not():
    estimate_all = jax.jit(lambda scores: {name: estimate(scores) for name, estimate in OF_ONE_GROUP.items()})
    for magnitude in (1e-3, 1.0, 1e3, 1e15):
        noisy, real = np.full((2, 1, 6), magnitude, np.float32)
        noisy[0, ::2] *= 1 + 4 * np.finfo(np.float32).eps
        real[0, ::2] *= 1 + np.float32(1e-5)
        assert not any(advantage.any() for advantage in estimate_all(noisy).values())
        for name, advantage in estimate_all(real).items():
            if magnitude == 1e3 and name.endswith(("normalized", "whiten", "supervised", "same_state_advantage")):
                np.testing.assert_allclose(advantage[0, :2], [1, -1], rtol=1e-2, err_msg=name)
            elif name != "pass_at_k":  # two reach the best score
                assert advantage.any(), name


@pytest.mark.parametrize("formula", [objectives.whiten, objectives.group_normalized])
def test_equal_scores_have_no_slope(formula):
    slope = jax.jit(jax.grad(lambda x: formula(x)[0, 1]))
    with jax.debug_nans(True):
        for scores in ([0.0] * 4, [1e8, 1e8 + 8, 1e8, 1e8], [-0.1] * 4):
            assert not jnp.any(slope(jnp.array([scores])))


def test_nan_stays_in_its_group():
    spoilt, clean = SCORES.copy(), in_groups(SCORES)
    spoilt[1, 2] = np.nan
    for name, result in in_groups(spoilt).items():
        if name != "batch_normalized":
            np.testing.assert_array_equal(np.delete(result, 1, axis=0), np.delete(clean[name], 1, axis=0))
            assert np.isnan(result[1]).any() or name == "max_rl"  # whose mean is not above 0


def test_groups_without_a_comparison_are_refused():
    x = jnp.ones((2, 6))
    for estimate in IN_GROUPS.values():
        with pytest.raises(ValueError, match="group_size is 1.*group_size >= 2"):
            estimate(x[:, :1])
    for estimate in (objectives.process_supervised, objectives.same_step_leave_one_out):
        for group_size, message in ((1, "group_size >= 2"), (4, "6 rollouts do not split into groups of 4")):
            with pytest.raises(ValueError, match=message):
                estimate(x, x, group_size)


def test_normalisation_is_free_of_scale():
    """The squares of 1e30 overflow float32, and those of 1e-30 vanish."""

    @jax.jit
    def both(scores):
        return objectives.group_normalized(scores, eps=0.0), objectives.whiten(scores, eps=0.0)

    for magnitude in (1e-30, 1e-3, 1e30):
        for actual, expected in zip(*map(both, (SCORES * np.float32(magnitude), SCORES)), strict=True):
            close(actual, expected, 1e-5)


def test_the_mean_of_equal_returns_is_exact():
    baseline = jax.jit(objectives.same_step_leave_one_out, static_argnums=2)
    for magnitude in MAGNITUDES:
        constant = np.full((8, 20), magnitude, np.float32)
        np.testing.assert_array_equal(baseline(constant, np.ones((8, 20), np.float32), 4), constant)


# --- values ----------------------------------------------------------------------------------------------------------


def test_estimators_of_each_other():
    found, x = in_groups(SCORES), SCORES.astype(np.float64)
    others = (x.sum(1, keepdims=True) - x) / 3
    close(found["leave_one_out"], 4 / 3 * np.asarray(found["group_centered"]))
    close(found["leave_one_out"], x - others)
    close(found["batch_normalized"], (x - x.mean(1, keepdims=True)) / (x.std() + 1e-6))
    nobody_leads = np.tile(np.float32([1.0, 5.0, 2.0, 5.0]), (5, 1))
    np.testing.assert_array_equal(in_groups(nobody_leads)["pass_at_k"], 0.0)


def test_whiten_ignores_what_is_masked():
    mask = np.asarray(steps(LENGTHS))
    values = np.random.default_rng(2).normal(50, 3, mask.shape)
    garbage = jnp.asarray(np.where(mask, values, np.nan), jnp.float32)
    for ddof in (0, 1):
        whiten, valid = jax.jit(functools.partial(objectives.whiten, ddof=ddof)), values[mask]
        expected = np.where(mask, (values - valid.mean()) / valid.std(ddof=ddof), 0.0)
        close(whiten(garbage, mask), expected, 1e-5)
        with jax.debug_nans(True):
            for number in (0, 1):  # hardly a valid step
                few = np.arange(mask.size).reshape(mask.shape) < number
                np.testing.assert_array_equal(whiten(values.astype(np.float32), few), 0.0)


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_process_supervised_against_loops(share):
    """Where a share of the steps is rewarded, the others have a part in no mean, and get what is to go."""
    mask, rng = np.asarray(steps(LENGTHS)), np.random.default_rng(3)
    rewards_, rewarded = rng.normal(1, 2, mask.shape), rng.random(mask.shape) < share
    expected = np.zeros(mask.shape)
    for g in range(0, mask.shape[1], 4):
        group = np.s_[:, g : g + 4]
        counted = (mask & rewarded)[group]
        valid = rewards_[group][counted]
        normalised = np.where(counted, (rewards_[group] - valid.mean()) / (valid.std() + 1e-6), 0)
        expected[group] = np.cumsum(normalised[::-1], axis=0)[::-1] * mask[group]
    garbage = jnp.asarray(np.where(mask, rewards_, np.nan), jnp.float32)
    estimate = jax.jit(objectives.process_supervised, static_argnums=2)
    actual = estimate(garbage, mask, 4, rewarded=rewarded)
    close(actual, expected, 1e-5)
    if share == 1.0:
        np.testing.assert_array_equal(actual, estimate(garbage, mask, 4))


def test_same_step_leave_one_out_against_loops():
    mask, group_size = np.asarray(steps(LENGTHS)), 4
    returns = np.random.default_rng(4).normal(5, 2, mask.shape)
    expected = np.zeros(mask.shape)
    for t, i in np.argwhere(mask):
        first = i // group_size * group_size
        others = [returns[t, j] for j in range(first, first + group_size) if j != i and mask[t, j]]
        expected[t, i] = np.mean(others) if others else 0.0
    garbage = jnp.asarray(np.where(mask, returns, np.nan), jnp.float32)
    result = jax.jit(objectives.same_step_leave_one_out, static_argnums=2)(garbage, mask, group_size)
    close(np.where(mask, result, 0.0), expected, 5e-6)
    alone = (mask.reshape(8, 5, 4).sum(-1, keepdims=True) == 1) & mask.reshape(8, 5, 4)
    assert alone.any(), "the case of the last member left must occur"


def test_a_component_that_does_not_apply_counts_in_no_mean_and_no_deviation():
    components = np.float32([[[0, 7, 1, 7]], [[0, 1, 0, 1]], [[7, 7, 3, 7]], [[7, 7, 7, 7]]])
    rewarded = np.array([[[1, 0, 1, 0]], [[1, 1, 1, 1]], [[0, 0, 1, 0]], [[0, 0, 0, 0]]], bool)
    advantage = jax.jit(objectives.decoupled_normalized)(components, np.float32([1, 10, 100, 1000]), rewarded)
    close(advantage, [[-1 - 10, 10, 1 - 10, 10]], 1e-4)


# --- generalised advantage estimation --------------------------------------------------------------------------------


def gae_oracle(rewards_, values, next_values, terminated, truncated, discount, gae_lambda):
    result, later = np.zeros_like(rewards_), 0.0
    for t in reversed(range(len(rewards_))):
        delta = rewards_[t] + discount * (1 - terminated[t]) * next_values[t] - values[t]
        later = delta + discount * gae_lambda * (1 - np.maximum(terminated[t], truncated[t])) * later
        result[t] = later
    return result


def test_gae_against_float64_on_random_draws():
    rng, shape = np.random.default_rng(5), (100, 12, 3)
    reals, flags = rng.normal(size=(3, *shape)), rng.random((2, *shape)) < 0.2  # both at once now and then
    discount, gae_lambda = rng.uniform(0.0, 1.0, (2, 100))
    draws = *reals, *flags, discount, gae_lambda
    expected = np.stack([gae_oracle(*(x[i] for x in draws)) for i in range(100)])

    @jax.jit
    @jax.vmap
    def estimate(r, v, nv, te, tr, discount, gae_lambda):
        at_one = objectives.gae(r, v, jnp.roll(v, -1, 0).at[-1].set(0.0), te, te & ~te, discount=discount, gae_lambda=1)
        returns = objectives.discounted_returns(r, te, discount=discount)
        return objectives.gae(r, v, nv, te, tr, discount=discount, gae_lambda=gae_lambda), at_one, returns - v

    arrays = [jnp.asarray(x, bool if x.dtype == bool else jnp.float32) for x in draws]
    actual, at_one, returns_less_values = estimate(*arrays)
    close(actual, expected, 1e-5)
    close(at_one, returns_less_values, 1e-5)


def test_nothing_reads_the_value_beyond_termination():
    one, ended = np.ones(3, np.float32), np.array([False, False, True])
    beyond = np.array([1, 1, np.nan], np.float32)
    advantage = jax.jit(objectives.gae)(one, one, beyond, ended, ~ended & False, discount=0.5, gae_lambda=1.0)
    np.testing.assert_array_equal(advantage, [0.75, 0.5, 0])


# --- rewards ---------------------------------------------------------------------------------------------------------


def test_overlong_punishment():
    lengths = jnp.asarray([0, 80, 85, 90, 100, 120])
    close(tokens.overlong_punishment(lengths, max_length=100, buffer=20), [0, 0, -0.25, -0.5, -1, -1])
    close(tokens.overlong_punishment(jnp.asarray([99, 100, 101]), max_length=100, buffer=0), [0, 0, -1])

"""A learning rate that follows the KL: the published rule, update by update, in rows and after an interruption."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import Probe, bits
from small import small_config

from grpo_jax import Hyperparams, make_init, make_train_step
from grpo_jax.updates.schedules import rate_for_kl

TARGETS = np.array([1e-7, 1e-3, 10.0])


def next_rate(rate, kl, target):
    """rsl_rl's rule, in float64."""
    if kl > 2 * target:
        return max(rate / 1.5, 1e-5)
    return min(rate * 1.5, 1e-2) if 0 < kl < target / 2 else rate


def test_the_rule_over_many_measurements():
    kls = np.float32(
        np.random.default_rng(0).choice([0.0, 1e-3, 4e-3, 0.01, 0.019, 0.03, 2.0], 300, p=[0.1] * 5 + [0.25] * 2)
    )
    kls[:40], kls[40:80] = 1e-4, 5.0  # up to the upper bound, then down to the lower one
    _, rates = jax.lax.scan(lambda r, kl: (rate_for_kl(r, kl, target=0.01),) * 2, jnp.float32(1e-3), jnp.asarray(kls))
    expected = functools.reduce(lambda rates, kl: [*rates, next_rate(rates[-1], kl, 0.01)], kls, [1e-3])[1:]
    np.testing.assert_allclose(rates, expected, rtol=1e-5)
    assert max(expected) == 1e-2 and min(expected) == 1e-5


def test_a_rate_outside_of_the_bounds_moves_only_towards_them():
    start = jnp.array([0.0, 1e-6, 0.1])
    np.testing.assert_allclose(rate_for_kl(start, 1e-4, target=0.01), [0, 1.5e-6, 0.1])
    np.testing.assert_allclose(rate_for_kl(start, 1.0, target=0.01), [0, 1e-6, 0.1 / 1.5])
    for kl in (np.nan, np.inf, -1e-9, 0.0):  # which says nothing
        assert rate_for_kl(jnp.float32(1e-3), jnp.float32(kl), target=0.01) == np.float32(1e-3)


@pytest.fixture(scope="module")
def four():
    """Four iterations of two updates each; only the second update of an iteration has a KL."""
    config = small_config("ppo", Probe(), num_steps=6, num_epochs=2, schedule="adaptive_kl", normalize_rewards=True)
    train_step = make_train_step(config)
    play = jax.jit(lambda state: jax.lax.scan(lambda s, _: train_step(s), state, length=4))
    return play, jax.jit(jax.vmap(play)), jax.jit(jax.vmap(make_init(config)))


def start(init):
    hyperparams = Hyperparams(kl_target=TARGETS, learning_rate=1e-3, total_steps=1e9)
    return init(jnp.stack([jax.random.key(0)] * 3), hyperparams.broadcast(3))


def test_every_update_has_the_rate_of_the_rule_and_reports_it(four):
    _, play, init = four
    state, metrics = play(start(init))
    after, reported = np.full(3, 1e-3), []
    for kl in 2 * np.asarray(metrics["policy/kl_behaviour"], np.float64).T:  # the mean with the first one, which is 0
        before, after = after, np.array([next_rate(*each) for each in zip(after, kl, TARGETS, strict=True)])
        reported.append((before + after) / 2)
    np.testing.assert_allclose(metrics["optim/learning_rate"].T, reported, rtol=1e-5)
    np.testing.assert_allclose(state.opt_state.learning_rate, after, rtol=1e-5)
    assert after[0] < 1e-3 < after[2], "a low target lowers the rate, a high one raises it"


row_of = jax.jit(lambda states, row: jax.tree.map(lambda leaf: leaf[row], states))


def test_rows_are_single_runs_and_an_interrupted_run_goes_on(four):
    single, play, init = four
    middle, _ = play(start(init))
    saved = jax.tree.map(lambda leaf: jnp.array(np.asarray(leaf)), middle.replace(key=jax.random.key_data(middle.key)))
    end, _ = play(middle)
    assert bits(play(saved.replace(key=jax.random.wrap_key_data(saved.key)))[0]) == bits(end)
    for row in (0, 2):
        alone, _ = single(row_of(middle, row))
        np.testing.assert_allclose(alone.opt_state.learning_rate, end.opt_state.learning_rate[row], rtol=1e-5)
        jax.tree.map(
            lambda one, rows, row=row: np.testing.assert_allclose(one, rows[row], rtol=2e-4, atol=1e-6),
            alone.params, end.params,
        )  # fmt: skip

"""Running statistics against NumPy in float64 over all rollouts, and their effect on a run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import Echo, Probe, bits, known_params, known_policy
from small import begin

from grpo_jax import Config, Hyperparams, evaluate, make_init, make_train_step
from grpo_jax.policies import MLP, normalization
from grpo_jax.policies.normalization import Normalizer, RunningStatistics, initial_normalizer, initial_statistics
from grpo_jax.rollouts.outcomes import scaled_rewards
from grpo_jax.types import Trajectory

merge, merge_rollout = jax.jit(normalization.merge), jax.jit(normalization.merge_rollout)
RNG = np.random.default_rng(0)
T, B, D = 16, 8, 3


def history(num_rollouts, offset, scale):
    """Observations whose mean and spread drift, and which of them are valid."""
    drift = np.linspace(0.5, 2.0, num_rollouts)[:, None, None, None]
    x = offset + scale * (drift + drift * RNG.standard_normal((num_rollouts, T, B, D)))
    valid = np.arange(T)[:, None] < RNG.integers(1, T + 1, (num_rollouts, 1, B))
    return x.astype(np.float32), valid


def trajectory(**fields):
    return Trajectory(**(dict.fromkeys(Trajectory._fields) | fields))


def test_statistics_equal_those_of_all_rollouts_at_once():
    merge_all = jax.jit(lambda *a: jax.lax.scan(lambda s, x: (merge(s, *x), None), *a))
    for offset, scale in ((0.0, 1.0), (1e6, 1e4), (-1e6, 1.0), (3.0, 1e-4), (0.0, 1e12)):
        xs, valid = history(50, offset, scale)
        end, _ = merge_all(initial_statistics(xs[0, 0, 0]), (xs, valid))
        seen = xs.astype(np.float64)[valid]
        mean = np.asarray(end.origin, np.float64) + np.asarray(end.mean, np.float64)
        np.testing.assert_allclose((mean - seen.mean(0)) / seen.std(0), 0.0, atol=1e-5)
        np.testing.assert_allclose(end.variance, seen.var(0), rtol=1e-5)
        np.testing.assert_allclose(end.count, valid.mean() * 50, rtol=1e-6)


def test_statistics_still_change_after_many_steps():
    """A billion steps, then a thousand rollouts from another distribution."""
    count = 1e9 / (T * B)
    before = RunningStatistics(*(jnp.full(D, value, jnp.float32) for value in (1e6, 0.0, 1.0, count)))
    x = (1e6 + 100.0 * RNG.choice([-1.0, 3.0], (T, B, D))).astype(np.float32)
    valid = np.ones((T, B), bool)
    after = jax.jit(lambda s: jax.lax.fori_loop(0, 1000, lambda i, s: merge(s, x, valid), s))(before)
    new = x.astype(np.float64).reshape(-1, D) - 1e6
    weight = 1000 / (count + 1000)
    assert (after.count == np.float32(count) + 1000).all()
    np.testing.assert_allclose(after.mean, weight * new.mean(0), rtol=1e-4)
    variance = (1 - weight) + weight * (new.var(0) + (1 - weight) * new.mean(0) ** 2)
    np.testing.assert_allclose(after.variance, variance, rtol=1e-4)


def test_values_not_finite_or_not_valid_change_nothing():
    xs, _ = history(1, 0.0, 1.0)
    start = merge(initial_statistics(xs[0, 0, 0]), xs[0], np.ones((T, B), bool))
    valid = np.ones((T, B), bool)
    valid[3:, 2] = False
    hidden = xs[0].copy()
    hidden[3:, 2] = np.nan
    without = np.where(valid[..., None], xs[0], 7.0)
    assert bits(merge(start, hidden, valid)) == bits(merge(start, without, valid)) != bits(start)
    hidden[0, 0, 1], hidden[1:4, 0, 1] = np.inf, np.nan
    after, expected = merge(start, hidden, valid), merge(start, without, valid)
    assert bits([leaf[::2] for leaf in after]) == bits([leaf[::2] for leaf in expected])
    seen = [xs[0][..., 1].ravel(), hidden[..., 1][np.isfinite(hidden[..., 1])]]
    np.testing.assert_allclose(after.origin[1] + after.mean[1], np.concatenate(seen).mean(dtype=np.float64), atol=1e-5)
    np.testing.assert_allclose(after.variance[1], np.concatenate(seen).var(dtype=np.float64), rtol=1e-5)
    assert bits(merge(start, np.full_like(hidden, np.nan), valid)) == bits(start)
    assert bits(merge(start, xs[0], np.zeros((T, B), bool))) == bits(start)


def test_several_arrays_have_statistics_each_and_integers_none():
    x = {"real": RNG.normal(5.0, 2.0, (T, B, D)).astype(np.float32), "token": np.ones((T, B), np.int32)}
    x["mask"] = x["real"] > 0
    rollout = trajectory(observation=x, valid=np.ones((T, B), bool), discounted_return=x["real"][..., 0])
    start = initial_normalizer(jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), x), observations=True, rewards=False)
    after = merge_rollout(start, rollout)
    assert after.observation["token"] is None and after.observation["mask"] is None and after.discounted_return is None
    real = start._replace(observation=start.observation["real"])
    alone = merge_rollout(real, rollout._replace(observation=x["real"]))
    assert bits(after.observation["real"]) == bits(alone.observation)
    observed = known_policy._replace(step=lambda params, observation, carry: observation)
    seen = normalization.normalized(observed, after.observation).step(None, x, ())
    assert bits((seen["token"], seen["mask"])) == bits((x["token"], x["mask"]))
    np.testing.assert_array_equal(
        seen["real"], normalization.normalized(observed, alone.observation).step(None, x["real"], ())
    )


def test_a_normalized_policy_sees_deviations_clipped():
    statistics = RunningStatistics(*(jnp.asarray(v, jnp.float32) for v in ([1e6, 0.0], [5.0, 0.0], [4.0, 0.0], 1.0)))
    policy = normalization.normalized(known_policy, statistics)
    params = known_params([0.0, 1.0], weights=(1.0, 100.0), bias=0.0)
    observations = jnp.array([[1e6 + 5, 0.0], [1e6 + 7, 0.0], [1e6, 0.0], [2e6, 1.0], [-2e6, -1.0]])
    expected = [0.0, 1.0, -2.5, 10.0 + 1000.0, -10.0 - 1000.0]
    nothing = jnp.zeros(5, jnp.int32)
    logits, values, carry = policy.step(params, observations, nothing)
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    _, values = policy.sequence(params, observations[None], nothing, jnp.zeros((1, 5), bool))
    np.testing.assert_allclose(values[0], expected, rtol=1e-6)
    assert carry.tolist() == [1] * 5 and logits.shape == (5, 2)
    assert normalization.normalized(known_policy, None) is known_policy


def test_rewards_are_scaled_then_clipped_and_not_centred():
    reward = jnp.array([[-8.0, 0.0, 2.0, 8.0]])
    scaled = Normalizer(None, RunningStatistics(*map(jnp.float32, (0.0, 100.0, 4.0, 1.0))))
    plain = Normalizer(None, None)
    cases = [(scaled, jnp.inf, [-4, 0, 1, 4]), (scaled, 1.5, [-1.5, 0, 1, 1.5]), (plain, 1.0, [-1, 0, 1, 1])]
    for normalizer, clip, expected in cases:
        actual = scaled_rewards(normalizer, trajectory(reward=reward), jnp.float32(clip))
        np.testing.assert_allclose(actual.reward, [expected], rtol=1e-6)
    assert bits(scaled_rewards(plain, trajectory(reward=reward), jnp.float32(jnp.inf)).reward) == bits(reward)


BOTH = {"normalize_observations": True, "normalize_rewards": True, "num_minibatches": 1, "num_epochs": 1}
DISCOUNT, ITERATIONS = 0.8, 5


@pytest.mark.parametrize(
    "algorithm, num_steps, limits, ages",
    [
        # Episodes of three steps continue across rollouts of four.
        ("ppo", 4, {}, np.arange(4 * ITERATIONS) % 3),
        # A one-episode rollout of three steps has two valid ones, and its episode does not continue.
        pytest.param("grpo", 3, {"lifetime": 2}, np.tile([0, 1], ITERATIONS), marks=pytest.mark.slow),
    ],
)
def test_a_run_keeps_the_statistics_of_all_its_valid_steps(algorithm, num_steps, limits, ages):
    limits = {"max_steps_in_episode": 3} | limits
    config = Config(Probe(), algorithm, num_envs=4, num_steps=num_steps, env_params=limits, **BOTH)
    hyperparams = Hyperparams(discount=DISCOUNT, reward_clip=0.25)
    start = jax.jit(make_init(config))(jax.random.key(0), hyperparams)
    end, metrics = jax.jit(lambda s: jax.lax.scan(lambda s, _: make_train_step(config)(s), s, length=ITERATIONS))(start)
    observation, discounted_return = end.normalizer
    np.testing.assert_allclose(observation.origin[0] + observation.mean[0], ages.mean(), rtol=1e-5)
    np.testing.assert_allclose(observation.variance[0], ages.var(), rtol=1e-5)
    returns = (1 - DISCOUNT ** (ages + 1)) / (1 - DISCOUNT)  # of steps that pay 1 each
    np.testing.assert_allclose(discounted_return.mean, returns.mean(), rtol=1e-5)
    np.testing.assert_allclose(discounted_return.variance, returns.var(), rtol=1e-5)
    # The update sees observations as they were acted upon: it begins at ratio 1.
    np.testing.assert_allclose(metrics["policy/ratio_max"], 1.0, atol=1e-5)
    # Metrics report the rewards before normalisation.
    assert set(metrics["episode/return_mean"].tolist()) == {max(ages) + 1.0}


def test_evaluation_uses_the_statistics_of_the_state_and_keeps_them():
    config = Config(environment=Echo(), num_envs=4, num_minibatches=1, network=MLP(()), normalize_observations=True)
    state = begin(config)
    # Greedy action 1 where the normalised mark is positive, which is right if the statistics have the mean 0.5.
    kernel = np.float32([[0.0, 0.0], [-1.0, 1.0]])
    params = {"actor": {"Dense_0": {"kernel": kernel, "bias": np.zeros(2, np.float32)}}}
    play = jax.jit(lambda state: evaluate(config, state, jax.random.key(1), num_episodes=200, greedy=True).returns)
    returns = []
    for mean in (0.5, 0.9, -1.0):
        statistics = RunningStatistics(*np.float32([[0.0, 0.0], [0.0, mean], [1.0, 1.0]]), np.float32(1))
        known = state.replace(params=params, normalizer=state.normalizer._replace(observation=statistics))
        before = bits(known)
        returns.append(np.mean(play(known)))
        assert bits(known) == before
    assert returns[0] == 1.0 and abs(returns[1] - 0.6) < 0.1 and abs(returns[2] - 0.5) < 0.1

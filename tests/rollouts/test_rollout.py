"""Rollouts in an environment about which everything is known: what is recorded, where it bootstraps, what is masked."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from probes import FOREVER, OneOrThirty, Probe, bits, known_params, known_policy, standing
from small import begin

from grpo_jax import PPO, Config, objectives
from grpo_jax.devices.execution_plan import CPU
from grpo_jax.environments import make_environment
from grpo_jax.groups import ANCHORED, CONTINUE
from grpo_jax.policies import MLP
from grpo_jax.rollouts import scan
from grpo_jax.rollouts.collect import collect
from grpo_jax.rollouts.rollout import Simulator

ONLY_ACTION_0 = (0.0, -np.inf)
probe = make_environment(Probe(), {"bonus": 0.5})


@functools.partial(jax.jit, static_argnames=("num_steps", "auto_reset", "greedy"))
def play(params, state, key, **settings):
    return Simulator(probe, known_policy, params).unroll(state, key, **settings)


def starting(ages, lifetimes, seed=0):
    return standing(probe, known_policy, jax.random.key(seed), ages=ages, lifetimes=lifetimes)


# --- truncation ------------------------------------------------------------------------------------------------------

# Six environments in one window of 7 steps, limit 3; the first episode of each has the lifetime given, others none.
# Each step pays 1 and V = 10 + 2 age; with discount and lambda 1/2 a step at age a has the error
#   1 + (10 + 2 (a + 1)) / 2 - (10 + 2 a) = -3 - a,   or   1 - (10 + 2 a) = -9 - 2 a   where it terminates,
# and a trace that decays by 1/4.
WINDOWS = {
    "truncated twice": (0, FOREVER, "..t..t.", [-4.3125, -5.25, -5, -4.3125, -5.25, -5, -3]),
    "truncated twice, begun before": (1, FOREVER, ".t..t..", [-5.25, -5, -4.3125, -5.25, -5, -4, -4]),
    "truncated at the first and last step": (2, FOREVER, "t..t..t", [-5, -4.3125, -5.25, -5, -4.3125, -5.25, -5]),
    "terminated, then truncated": (0, 2, ".T..t..", [-5.75, -11, -4.3125, -5.25, -5, -4, -4]),
    "terminated at the limit, then truncated": (0, 3, "..T..t.", [-4.8125, -7.25, -13, -4.3125, -5.25, -5, -3]),
    "terminated at the first step": (1, 2, "T..t..t", [-11, -4.3125, -5.25, -5, -4.3125, -5.25, -5]),
}


@pytest.fixture(scope="module")
def window():
    ages, lifetimes, *_ = zip(*WINDOWS.values(), strict=True)
    state = starting(ages, lifetimes)
    _, trajectory = play(known_params(ONLY_ACTION_0), state, jax.random.key(1), num_steps=7, auto_reset=True)
    gae = jax.jit(functools.partial(objectives.gae, discount=0.5, gae_lambda=0.5))
    ends = trajectory.terminated, trajectory.truncated
    advantages = gae(trajectory.reward, trajectory.value, trajectory.next_value, *ends)
    return jax.device_get((trajectory, advantages))


def test_truncation_bootstraps_from_the_true_final_observation(window):
    trajectory, advantages = window
    for column, (name, (age, _, ends, advantage)) in enumerate(WINDOWS.items()):
        ages = []
        for end in ends:
            ages.append(age)
            age = 0 if end != "." else age + 1
        assert trajectory.observation[:, column, 0].tolist() == ages, name
        assert trajectory.terminated[:, column].tolist() == [end == "T" for end in ends], name
        assert trajectory.truncated[:, column].tolist() == [end == "t" for end in ends], name
        assert trajectory.value[:, column].tolist() == [10.0 + 2 * age for age in ages], name
        # Where an episode only terminates nothing reads the next value; elsewhere it is that of the next age.
        bootstraps = np.array([end != "T" for end in ends])
        expected = 12.0 + 2 * np.array(ages)
        assert trajectory.next_value[bootstraps, column].tolist() == expected[bootstraps].tolist(), name
        np.testing.assert_allclose(advantages[:, column], advantage, rtol=0, atol=1e-6, err_msg=name)


# --- episodes that follow each other ---------------------------------------------------------------------------------

NUM_ENVS, NUM_STEPS = 256, 40


@pytest.fixture(scope="module")
def long():
    ages, lifetimes = np.arange(NUM_ENVS) % 3, 1 + np.arange(NUM_ENVS) % 4
    lifetimes = np.maximum(lifetimes, ages + 1)
    state = starting(ages, lifetimes)
    after, trajectory = play(known_params((0.0, 0.0)), state, jax.random.key(2), num_steps=NUM_STEPS, auto_reset=True)
    return jax.tree.map(np.asarray, (state, after, trajectory))


def test_returns_and_lengths_are_those_of_a_loop(long):
    before, after, trajectory = long
    for b in range(NUM_ENVS):
        total, length, mark = float(before.episode_return[b]), int(before.episode_length[b]), before.observation[b, 1]
        for t in range(NUM_STEPS):
            assert trajectory.observation[t, b, 0] == length
            assert trajectory.observation[t, b, 1] == mark
            reward = 1.0 + 0.5 * trajectory.action[t, b]
            total, length = total + reward, length + 1
            assert trajectory.reward[t, b] == reward
            assert (trajectory.episode_return[t, b], trajectory.episode_length[t, b]) == (total, length)
            if trajectory.ended[t, b]:
                total, length = 0.0, 0
                mark = trajectory.observation[t + 1, b, 1] if t + 1 < NUM_STEPS else after.observation[b, 1]
        assert (after.episode_return[b], after.episode_length[b]) == (total, length)
    assert trajectory.valid.all()


def test_actions_are_drawn_anew_for_each_environment_and_step(long):
    actions = long[2].action
    assert abs(actions.mean() - 0.5) < 5 * 0.5 / np.sqrt(actions.size)
    assert len({column.tobytes() for column in actions.T}) == NUM_ENVS
    assert len({row.tobytes() for row in actions}) == NUM_STEPS


def test_start_states_have_the_distribution_of_reset_and_none_comes_twice(long):
    _, _, trajectory = long
    begins = np.flatnonzero(trajectory.ended[:-1])
    starts = trajectory.observation[1:, :, 1].reshape(-1)[begins]
    assert starts.size > 3000 and np.unique(starts).size > starts.size - 5, "float32 draws coincide once in millions"
    counts = np.histogram(starts, bins=10, range=(0, 1))[0]
    chi_square = np.sum((counts - starts.size / 10) ** 2) / (starts.size / 10)
    assert chi_square < 27.9, "9 degrees of freedom: exceeded once in a thousand"


@pytest.mark.slow
@pytest.mark.parametrize("generator", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("start", [CONTINUE, ANCHORED], ids=["continued", "anchored"])
def test_short_episodes_are_no_more_frequent_than_their_starts(start, generator):
    config = Config(OneOrThirty(), PPO._replace(start=start), num_envs=64, group_size=1, network=MLP((2,)))
    state = begin(config)
    simulator = Simulator(config.env, config.policy, state.params)

    def iteration(rollout, key):
        rollout, trajectory = collect(config, simulator, rollout, key, key)
        return rollout, (trajectory.ended.sum(), trajectory.ended & (trajectory.episode_length == 1))

    keys = jax.random.split(jax.random.key(1, impl=generator), 60)
    _, (num_ended, short) = jax.jit(lambda rollout, keys: jax.lax.scan(iteration, rollout, keys))(state.rollout, keys)
    expected = 64 * 128 / OneOrThirty.MEAN_LENGTH
    assert abs(num_ended.mean() / expected - 1) < 0.03
    assert abs(short.sum() / num_ended.sum() - 0.75) < 0.01


@pytest.mark.parametrize("num_draws", [0, pytest.param(40, marks=pytest.mark.slow)])
def test_how_many_start_states_are_drawn_ahead_changes_nothing(long, num_draws):
    before, *expected = long
    plan = dataclasses.replace(CPU, num_reset_draws=num_draws, steps_per_loop=4)
    simulator = Simulator(probe, known_policy, known_params((0.0, 0.0)), plan=plan)
    traced_again = jax.jit(functools.partial(simulator.unroll, num_steps=NUM_STEPS, auto_reset=True))
    assert bits(traced_again(before, jax.random.key(2))) == bits(tuple(expected))


# --- one episode each ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_episode():
    state = starting([0, 0, 0, 2], [1, 2, FOREVER, FOREVER])
    params = known_params((0.0, 0.0))
    return jax.device_get((state, *play(params, state, jax.random.key(3), num_steps=6, auto_reset=False)))


def test_what_follows_the_end_is_masked_and_changes_nothing(one_episode):
    before, after, trajectory = one_episode
    lengths = np.array([1, 2, 3, 1])
    valid = np.arange(6)[:, None] < lengths
    assert np.array_equal(trajectory.valid, valid)
    assert np.array_equal(trajectory.ended, np.arange(6)[:, None] == lengths - 1)
    assert np.array_equal(trajectory.reward, np.where(valid, 1.0 + 0.5 * trajectory.action, 0.0))
    ages = before.environment.time + lengths
    assert np.array_equal(after.environment.time, ages)
    assert np.array_equal(after.episode_length, ages)
    assert np.array_equal(after.episode_return, before.episode_return + trajectory.reward.sum(0))
    assert bits(after.environment.mark) == bits(before.environment.mark)
    for b, length in enumerate(lengths):
        assert len({bits(observation)[0] for observation in trajectory.observation[length:, b]}) == 1
        assert np.array_equal(trajectory.observation[-1, b], after.observation[b])
    assert np.array_equal(trajectory.episode_return[-1], after.episode_return)


def test_a_longer_rollout_adds_masked_steps_and_nothing_else(one_episode):
    before, after, trajectory = one_episode
    params = known_params((0.0, 0.0))
    longer, steps = jax.device_get(play(params, before, jax.random.key(3), num_steps=9, auto_reset=False))
    assert not steps.valid[6:].any() and not steps.reward[6:].any() and not steps.ended[6:].any()
    assert bits(after._replace(policy_carry=())) == bits(longer._replace(policy_carry=()))
    assert np.array_equal(trajectory.action, steps.action[:6])


def test_in_each_block_other_actions_and_another_environment(monkeypatch):
    lengths = {1: 1, 128: 128, 500: 125, 254: 127, 131: 1}
    assert {num_steps: scan.block_length(num_steps) for num_steps in lengths} == lengths
    monkeypatch.setattr(scan, "MAX_BLOCK", 20)
    params, state = known_params((0.0, 0.0)), starting([0] * 4, [FOREVER] * 4)
    _, trajectory = play(params, state, jax.random.key(0), num_steps=40, auto_reset=True)
    action = np.asarray(trajectory.action).reshape(2, 20, 4)
    assert trajectory.action.shape == (40, 4) and len({block.tobytes() for block in action}) == 2
    assert 40 < action.sum() < 120
    # Episodes of three steps: one goes on from the last step of a block, its second, to the first of the next.
    assert np.array_equal(trajectory.episode_return[20] - trajectory.reward[20], trajectory.episode_return[19])


def test_noise_without_a_number_for_each_step_is_refused():
    family = known_policy.distribution._replace(noise=lambda key, shape: jax.random.uniform(key, shape[1:]))
    simulator = Simulator(probe, known_policy._replace(distribution=family), known_params((0.0, 0.0)))
    unroll = functools.partial(simulator.unroll, num_steps=4, auto_reset=True)
    with pytest.raises(ValueError, match=r"noise\(key, \(4, 4\)\) returned shape \(4,\)"):
        jax.eval_shape(unroll, starting([0] * 4, [FOREVER] * 4), jax.random.key(0))


def test_truncation_more_often_than_the_limit_allows_is_not_a_number():
    values, final_values = np.arange(10.0, 18.0)[:, None], np.array([[20.0], [18.0]])  # one slot, and the end
    truncated = np.isin(np.arange(8), [1, 4, 7])[:, None]
    actual = jax.jit(objectives.next_values)(values, final_values, truncated)
    np.testing.assert_array_equal(actual[:, 0], [11, 20, 13, 14, np.nan, 16, 17, np.nan])

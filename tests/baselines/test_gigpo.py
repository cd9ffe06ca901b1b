"""GiGPO's step term against dictionaries of states in float64: exact states, bins, and turns of texts."""

import collections
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from probes import check

from grpo_jax import Config
from grpo_jax.algorithms import GIGPO
from grpo_jax.baselines import GigpoHyperparams, gigpo_advantage, same_state_advantage, same_turn_advantage
from grpo_jax.errors import ConfigError
from grpo_jax.policies import MLP
from grpo_jax.policies.token_policy import TokenCarry

T, N, GROUP = 12, 12, 6
OPTIONS = {"rtol": 2e-4, "atol": 2e-5}
by_state = jax.jit(same_state_advantage, static_argnames="group_size")
by_turn = jax.jit(same_turn_advantage, static_argnames="group_size")


def advantages(visits):
    """`[T, N]`: of `{state: [(place, return)]}`, 0 elsewhere."""
    result = np.zeros((T, N))
    for found in visits.values():
        returns = np.array([value for _, value in found], np.float64)
        for (place, _), value in zip(found, (returns - returns.mean()) / (returns.std() + 1e-6), strict=True):
            result[place] = value
    return result


def random_steps(seed):
    rng = np.random.default_rng(seed)
    mask = np.arange(T)[:, None] < rng.integers(1, T + 1, N)
    return rng, rng.normal(size=(T, N)).astype(np.float32), mask


@pytest.mark.parametrize("width", [None, 0.7, (0.4, 2.0)])
def test_steps_in_the_same_bin_are_compared(width):
    rng, returns, mask = random_steps(0)
    state = rng.integers(-1, 2, (T, N, 2)).astype(np.float32) if width is None else rng.normal(size=(T, N, 2))
    state = state.astype(np.float32)
    visits = collections.defaultdict(list)
    for t, i in zip(*np.nonzero(mask), strict=True):
        key = state[t, i] if width is None else np.floor(state[t, i] / np.float32(width))
        visits[(i // GROUP, *key.tolist())].append(((t, i), returns[t, i]))
    assert max(map(len, visits.values())) > 3
    binned = state if width is None else gigpo_advantage(width)._binned(state)
    np.testing.assert_allclose(by_state(returns, binned, mask, GROUP), advantages(visits), **OPTIONS)


def random_turns(seed):
    """Tokens of few kinds, so that texts repeat; the policy or the task writes each; texts end at different steps."""
    rng, rewards, mask = random_steps(seed)
    tokens = (rng.random((T, N)) < 0.85).astype(np.int32)
    tokens[0] = 1  # the prompt's last
    acted = mask & (np.arange(T)[:, None] % 4 < rng.integers(2, 4, N))
    return np.where(mask, rewards, 0.0), tokens, acted


@pytest.mark.parametrize("seed", range(2))
def test_turns_after_the_same_text_are_compared(seed):
    rewards, tokens, acted = random_turns(seed)
    discount, visits, turn_of = 0.8, collections.defaultdict(list), {}
    for i in range(N):
        starts = [t for t in range(T) if acted[t, i] and (t == 0 or not acted[t - 1, i])]
        sums = [rewards[a:b, i].astype(np.float64).sum() for a, b in zip(starts, [*starts[1:], T], strict=True)]
        for k, start in enumerate(starts):
            worth = sum(discount**later * value for later, value in enumerate(sums[k:]))
            visits[(i // GROUP, *tokens[: start + 1, i])].append(((start, i), worth))
        turn_of |= {(t, i): max(s for s in starts if s <= t) for t in range(T) if acted[t, i]}
    at_starts, expected = advantages(visits), np.zeros((T, N))
    assert any(len(found) > 1 and found[0][0][0] > 0 for found in visits.values())  # later turns are shared too
    for (t, i), start in turn_of.items():
        expected[t, i] = at_starts[start, i]
    np.testing.assert_allclose(by_turn(rewards, tokens, acted, GROUP, discount=discount), expected, **OPTIONS)


def test_without_equal_states_the_step_term_is_0():
    _, returns, mask = random_steps(5)
    state = np.arange(T * N).reshape(T, N)
    np.testing.assert_array_equal(by_state(returns, state, mask, GROUP), 0.0)
    rewards, tokens, acted = random_turns(5)
    tokens[0] = np.arange(N)  # no two members have read the same
    np.testing.assert_array_equal(by_turn(rewards, tokens, acted, GROUP, discount=1.0), 0.0)


def test_a_text_of_one_turn_is_compared_as_a_whole():
    rewards, tokens, _ = random_turns(6)
    acted, scores = np.ones((T, N), bool), rewards.astype(np.float64).sum(0).reshape(-1, GROUP)
    expected = (scores - scores.mean(1, keepdims=True)) / scores.std(1, keepdims=True)
    actual = by_turn(rewards, tokens, acted, GROUP, discount=0.5)
    np.testing.assert_allclose(actual, np.broadcast_to(expected.reshape(1, -1), (T, N)), **OPTIONS)


def test_widths_that_do_not_fit_say_what_to_write():
    sizes = {"num_envs": 8, "group_size": 4, "num_minibatches": 2, "network": MLP((4,))}
    for environment, width, message in (
        ("CartPole-v1", (0.1, 0.1, 0.1), r"3 widths, but an observation has shape \(4,\); write one number"),
        ("FourRooms-misc", 0.1, r"whole numbers, which are compared exactly; write gigpo_advantage\(\)"),
        ("CartPole-v1", -0.1, r"positive and finite.*bin_width=0\.1.*leave it out"),
        ("CartPole-v1", float("nan"), r"positive and finite.*bin_width=0\.1.*leave it out"),
    ):
        with pytest.raises(ConfigError, match=message):
            algorithm = GIGPO._replace(advantage=gigpo_advantage(width))
            check(Config(environment, algorithm=algorithm, **sizes))


@pytest.mark.parametrize("carry", [(), TokenCarry((), (), ())], ids=["steps", "turns"])
def test_a_transformer_compares_turns_and_others_steps(carry):
    rewards, tokens, acted = random_turns(7)
    fields = {"reward": rewards, "valid": acted, "acted": acted, "ended": np.zeros((T, N), bool)}
    trajectory = SimpleNamespace(observation=tokens, carry=carry, diverged=None, **fields)

    @jax.jit
    def advantage(coef):
        return GIGPO.advantage(trajectory, GigpoHyperparams(discount=1.0, step_advantage_coef=coef), GROUP)

    episode, both = advantage(0.0), advantage(2.0)
    if carry:
        step = by_turn(rewards, tokens, acted, GROUP, discount=1.0)
    else:
        step = by_state(np.cumsum(rewards[::-1], 0)[::-1], tokens, acted, GROUP)
    np.testing.assert_allclose(both - episode, 2 * step, **OPTIONS)

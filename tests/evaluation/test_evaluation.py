"""Evaluation plays whole episodes of known return, and changes nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import FOREVER, Probe
from small import begin, small_config

from grpo_jax import evaluate
from grpo_jax.evaluation import episodes
from grpo_jax.evaluation.episodes import record_episodes
from grpo_jax.policies import MLP

BONUS, LIFETIME, NUM_EPISODES = 0.5, 5, 64


@pytest.fixture(scope="module")
def probe():
    limits = {"bonus": BONUS, "lifetime": LIFETIME, "max_steps_in_episode": 8}
    config = small_config("grpo", Probe(), num_envs=4, network=MLP(()), env_params=limits)
    state = begin(config)
    # Action 1, which pays the bonus, has probability 3/4.
    params = jax.tree.map(np.zeros_like, state.params)
    params["actor"]["Dense_0"]["bias"] = np.array([0.0, np.log(3.0)], np.float32)
    return config, state.replace(params=params)


@pytest.fixture(scope="module")
def sampled(probe):
    return jax.jit(lambda state, key: evaluate(probe[0], state, key, num_episodes=NUM_EPISODES))


def test_greedy_episodes_have_the_known_return(probe):
    """Whether they terminate or reach the time limit."""
    config, state = probe

    @jax.jit
    def play(lifetime):
        options = {"num_episodes": 8, "greedy": True, "env_params": {"lifetime": lifetime}}
        return evaluate(config, state, jax.random.key(0), **options)

    for lifetime, length in ((LIFETIME, LIFETIME), (FOREVER, 8)):
        result = play(np.int32(lifetime))
        assert result.returns.tolist() == [length * (1 + BONUS)] * 8 and result.lengths.tolist() == [length] * 8


def test_every_environment_has_equally_many_episodes(probe):
    """Also where episodes times environments are more than 2^31."""
    num_envs = 50_000
    config = small_config("grpo", Probe(), num_envs=num_envs, network=MLP(()), env_params={"max_steps_in_episode": 1})
    bonus, state = np.arange(num_envs, dtype=np.float32), probe[1]
    params = {"bonus": bonus, "lifetime": np.full(num_envs, FOREVER), "nan_below": np.full(num_envs, -1.0)}
    state = state.replace(rollout=state.rollout._replace(environment_params=params))
    play = jax.jit(lambda state: evaluate(config, state, jax.random.key(0), num_episodes=num_envs, greedy=True))
    assert np.array_equal(play(state).returns, 1 + bonus)


def test_sampled_episodes_have_it_in_the_mean(probe, sampled):
    _, state = probe
    result = sampled(state, jax.random.key(0))
    assert result.returns.shape == result.lengths.shape == (NUM_EPISODES,)
    assert result.lengths.dtype == jnp.int32 and (result.lengths == LIFETIME).all()
    bonuses = (result.returns - LIFETIME) / BONUS
    assert np.array_equal(bonuses, np.round(bonuses)) and len(set(bonuses.tolist())) > 2
    assert abs(bonuses.mean() - LIFETIME * 3 / 4) < 4 * np.sqrt(LIFETIME * 3 / 16 / NUM_EPISODES)


def test_it_vmaps_over_states_and_keys(probe, sampled):
    _, state = probe
    states = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
    better = states.params["actor"]["Dense_0"]["bias"].at[1].set(jnp.array([0.0, 1e3]))
    states = states.replace(params={"actor": {"Dense_0": states.params["actor"]["Dense_0"] | {"bias": better}}})
    keys = jax.random.split(jax.random.key(2), 2)
    result = jax.jit(jax.vmap(sampled))(states, keys)
    assert np.array_equal(result.returns[0], sampled(state, keys[0]).returns)
    assert (result.returns[1] == LIFETIME * (1 + BONUS)).all()


def test_recorded_episodes_are_whole_and_no_longer(probe):
    config, state = probe
    bonus = jnp.array([1.0, 1.0, 3.0, 3.0])  # of the environments in the state, over which episodes are spread
    rollout = state.rollout._replace(environment_params=state.rollout.environment_params | {"bonus": bonus})
    (steps,) = record_episodes(config, state.replace(rollout=rollout), jax.random.key(0), num_episodes=2, greedy=True)
    assert steps.lengths.tolist() == [[i, i] for i in range(LIFETIME + 1)]
    assert np.array_equal(steps.returns, steps.lengths * np.array([2.0, 4.0]))
    assert np.array_equal(steps.states.time, steps.lengths)
    assert (steps.states.mark == steps.states.mark[0]).all() and len(steps.observations) == LIFETIME + 1


def test_recorded_episodes_come_in_chunks(probe, monkeypatch):
    monkeypatch.setattr(episodes, "CHUNK", 3)
    chunks = list(record_episodes(*probe, jax.random.key(0)))
    assert [steps.lengths[:, 0].tolist() for steps in chunks] == [[0, 1, 2], [3, 4, 5]]


class Counting(Probe):
    """A `Probe` that says when it is traced."""

    traces = []

    def step_env(self, key, state, action, params):
        self.traces.append("step")
        return super().step_env(key, state, action, params)


def test_a_second_call_compiles_nothing(probe):
    traces, config = Counting.traces, dataclasses.replace(probe[0], environment=Counting())
    for _ in range(2):
        evaluate(config, probe[1], jax.random.key(1), num_episodes=4)
        list(record_episodes(config, probe[1], jax.random.key(1)))
        traces.append(None)
    assert traces.index(None) == len(traces) - 2 > 0

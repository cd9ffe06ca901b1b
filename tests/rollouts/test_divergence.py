"""Environments whose states become NaN: the step is discarded, what came before is right, and the run goes on."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import FOREVER, Probe, known_params, known_policy, random_play, standing
from small import begin, small_config

from grpo_jax import Hyperparams, evaluate, make_init, make_train_step, objectives
from grpo_jax.environments import make_environment
from grpo_jax.evaluation.episodes import record_episodes
from grpo_jax.policies import MLP
from grpo_jax.rollouts.rollout import Simulator


class Bursting(Probe):
    """A `Probe` whose mark becomes NaN at the end of its lifetime if the action is 1."""

    can_diverge = True

    def step_env(self, key, state, action, params):
        _, state, reward, _, info = super().step_env(key, state, action, params)
        bursts = (state.time == state.lifetime) & (action == 1)
        state = state.replace(mark=jnp.where(bursts, jnp.nan, state.mark))
        return self.get_obs(state), state, reward, False, info


class Unguarded(Bursting):
    can_diverge = False


def test_without_the_guard_a_rollout_has_nan():
    play = random_play(make_environment(Unguarded(), {"lifetime": 2}), 8, 3)
    assert np.isnan(play(jax.random.key(0))[2].observation).any(), "the control of those below"


def are_finite(tree):
    return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))


# The limit is 3, later episodes burst in their second step. V = 10 + 2 age; see WINDOWS in test_rollout.py.
ONLY_ACTION_1 = (-np.inf, 0.0)
BURSTS = {  # age, age at which it bursts; ends ("x": diverged); steps that count, and their advantages
    "in its second step": (0, 2, ".x.x.x.", [-3]),
    "after a truncation": (0, FOREVER, "..t.x.x", [-4.3125, -5.25, -5, -3]),
    "in the first step of the rollout": (2, 3, "x.x.x.x", []),
    "in the first step of an episode": (2, FOREVER, "t.x.x.x", [-5, -3]),
}


def test_the_step_before_a_nan_bootstraps_from_the_last_finite_state():
    ages, bursts, ends, advantages = zip(*BURSTS.values(), strict=True)
    env = make_environment(Bursting(), {"lifetime": 2})
    start = standing(env, known_policy, jax.random.key(0), ages=ages, lifetimes=bursts)
    simulator = Simulator(env, known_policy, known_params(ONLY_ACTION_1))

    @jax.jit
    def play(start, key):
        state, steps = simulator.unroll(start, key, num_steps=7, auto_reset=True)
        ends = steps.terminated, steps.truncated
        return (
            state,
            steps,
            objectives.gae(*(steps.reward, steps.value, steps.next_value, *ends), discount=0.5, gae_lambda=0.5),
        )

    state, steps, gae = jax.device_get(play(start, jax.random.key(1)))
    for i, advantage in enumerate(advantages):
        num_valid = len(advantage)
        assert "".join("x" if diverged else "." for diverged in steps.diverged[:, i]) == ends[i].replace("t", ".")
        assert steps.valid[:, i].tolist() == [True] * num_valid + [False] * (7 - num_valid)
        cuts = [t for t in range(num_valid) if ends[i][t] == "t" or t == num_valid - 1]
        assert np.flatnonzero(steps.truncated[:, i]).tolist() == cuts and not steps.terminated.any()
        np.testing.assert_allclose(gae[:num_valid, i], advantage, rtol=0, atol=1e-6)
    assert are_finite((state, steps._replace(distribution=None)))
    # A new episode follows at once, so the next rollout begins in its middle.
    assert (
        state.episode_length.tolist() == state.environment.time.tolist() == state.policy_carry.tolist() == [1, 0, 0, 0]
    )


def trained(config):
    """The state after a train step, and its metrics."""
    return jax.jit(make_train_step(config))(jax.jit(make_init(config))(jax.random.key(0), Hyperparams()))


@pytest.mark.parametrize("algorithm", [pytest.param("ppo", marks=pytest.mark.slow), "grpo"])
def test_training_goes_on_past_states_that_are_nan(algorithm):
    fields = {"num_envs": 32, "env_params": {"lifetime": 2}}
    fields |= {"num_steps": 8} if algorithm != "grpo" else {"group_size": 8}
    config = small_config(algorithm, Bursting(), network=MLP(()), **fields)
    after, metrics = trained(config)
    assert metrics["optim/skipped_updates"] == 0 and 0 < metrics["environment/invalid_resets"] < 128
    assert are_finite((after.params, after.rollout))
    made = 3 * 32 - metrics["environment/invalid_resets"] if algorithm == "grpo" else 8 * 32
    assert metrics["environment/steps"] == made
    # The members that are left have equal rewards; the others would have less.
    assert (metrics["advantage/abs_mean"] < 1e-6) == config.algorithm.start.grouped


def test_an_evaluated_episode_ends_at_its_last_finite_state():
    config = small_config(environment=Bursting(), env_params={"lifetime": 2, "max_steps_in_episode": 5})
    state = begin(config)
    played = jax.jit(lambda state, key: evaluate(config, state, key, num_episodes=64))(state, jax.random.key(1))
    assert set(played.lengths.tolist()) == {1, 5} and np.array_equal(played.returns, played.lengths)
    (steps,) = record_episodes(config, state, jax.random.key(1), num_episodes=16)
    assert set(steps.lengths[-1].tolist()) == {1, 5} and len(steps.lengths) == 6 and are_finite(steps)


def test_a_diverged_member_does_not_move_its_group():
    rewards = np.float32([[1.0, 2.0, 6.0, 50.0], [4.0, 4.0, 4.0, 9.0], [7.0] * 4]).reshape(1, -1)
    diverged = np.array([[0, 0, 0, 1], [0, 0, 0, 1], [1] * 4], bool).reshape(1, -1)

    @jax.jit
    def compare(reward, diverged):
        steps = types.SimpleNamespace(reward=reward, valid=reward > 0, diverged=diverged)
        scores = objectives.episode_scores(steps, 4)
        return scores, objectives.group_centered(scores)

    scores, centred = map(np.asarray, compare(rewards, diverged))
    assert scores.tolist() == [[1.0, 2.0, 6.0, 3.0], [4.0] * 4, [0.0] * 4]
    np.testing.assert_allclose(centred[0], [-2, -1, 3, 0], atol=1e-6)

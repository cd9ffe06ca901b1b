"""Rewards of whole episodes, which an environment gives once, at the end of a rollout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import FOREVER, Probe, bits, check, known_params, known_policy, standing
from small import begin

from grpo_jax import GRPO, PPO, Config, evaluate
from grpo_jax.environments import make_environment
from grpo_jax.errors import ConfigError
from grpo_jax.evaluation.episodes import record_episodes
from grpo_jax.objectives import decoupled_normalized, outcome, reward_part_scores, reward_part_weights
from grpo_jax.policies import MLP
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.types import RewardParts

plain = make_environment(Probe(), {"max_steps_in_episode": 4})


def ages_and_marks(states, params):
    """Two parts: the age, which counts twice, and the mark times the parameter bonus."""
    values = jnp.stack([states.time.astype(jnp.float32), states.mark], axis=1)
    return RewardParts(values, jnp.stack([jnp.full_like(params["bonus"], 2.0), params["bonus"]], axis=1))


rewarded = plain._replace(outcome=ages_and_marks)


class Paying(Probe):
    def outcome(self, states, params):
        return ages_and_marks(states, {"bonus": params.bonus})


def tens_at_odd_steps(states, params):
    """Step t of an episode pays 10 t, and at t = 1 and t = 3 the reward is one of its own."""
    values = jnp.broadcast_to(10.0 * jnp.arange(4.0), (*states.time.shape, 4))[..., None]
    rewarded = jnp.broadcast_to(jnp.arange(4) % 2 == 1, values.shape[:-1])
    return RewardParts(values, jnp.broadcast_to(params["bonus"][:, None, None], values.shape), rewarded)


stepwise = plain._replace(outcome=tens_at_odd_steps)


@jax.jit
def play(key):
    """Episodes that end at ages 2, 4 (both truncated and not) and 1, without an outcome and with two."""
    results = []
    for env in (plain, rewarded, stepwise):
        start = standing(env, known_policy, key, ages=[0, 0, 1], lifetimes=[2, FOREVER, 2])
        params = start.environment_params | {"bonus": jnp.array([0.5, 1.0, 2.0])}
        simulator = Simulator(env, known_policy, known_params((0.0, -jnp.inf)), discount=0.5)
        results.append(simulator.unroll(start._replace(environment_params=params), key, num_steps=5, auto_reset=False))
    return results


def test_the_last_valid_step_of_each_environment_pays_the_outcome():
    (end, trajectory), (paid_end, paid), _ = play(jax.random.key(0))
    length = np.array([2, 4, 1])
    last = np.arange(5)[:, None] == length - 1
    assert trajectory.valid.sum(axis=0).tolist() == length.tolist()
    expected = 2 * np.array([2, 4, 2]) + np.array([0.5, 1, 2]) * end.environment.mark
    for field in ("reward", "episode_return", "discounted_return"):
        added = np.where(trajectory.valid, getattr(paid, field) - getattr(trajectory, field), 0)
        np.testing.assert_allclose(added, np.where(last, expected, 0), rtol=1e-5, err_msg=field)
    for field in ("episode_return", "discounted_return"):
        np.testing.assert_allclose(getattr(paid_end, field) - getattr(end, field), expected, rtol=1e-5)
    assert paid.reward_parts.values.shape == paid.reward_parts.weights.shape == (5, 3, 2)
    np.testing.assert_allclose(
        (paid.reward_parts.values * paid.reward_parts.weights).sum(axis=2), np.where(last, expected, 0), rtol=1e-6
    )
    others = dict.fromkeys(("reward", "episode_return", "discounted_return", "reward_parts"))
    assert bits(trajectory._replace(**others)) == bits(paid._replace(**others))


def test_each_step_pays_its_part_of_an_outcome_of_steps():
    """The episodes begin at steps 0, 0 and 1, with the weights 0.5, 1 and 2, and have 2, 4 and 1 steps here."""
    (end, trajectory), _, (paid_end, paid) = play(jax.random.key(0))
    reward = np.array([[0, 0, 20], [5, 10, 0], [0, 20, 0], [0, 30, 0], [0, 0, 0]])
    np.testing.assert_allclose(paid.reward - trajectory.reward, reward)
    returns = np.where(paid.valid, np.cumsum(reward, axis=0), 0)
    np.testing.assert_allclose(np.where(paid.valid, paid.episode_return - trajectory.episode_return, 0), returns)
    np.testing.assert_allclose(paid_end.episode_return - end.episode_return, [5, 60, 20])
    discounted = paid.discounted_return - trajectory.discounted_return
    np.testing.assert_allclose(discounted[:4, 1], [0, 10, 25, 42.5])
    np.testing.assert_allclose(paid_end.discounted_return - end.discounted_return, [5, 42.5, 20])
    assert (paid.reward_parts.values[..., 0] * paid.reward_parts.weights[..., 0] == reward).all()
    assert paid.reward_parts.rewarded[..., 0].T.tolist() == [[0, 1, 0, 0, 0], [0, 1, 0, 1, 0], [1, 0, 0, 0, 0]]


def with_step_parts(*arguments):
    moved = plain.step(*arguments)
    return moved._replace(reward_parts=RewardParts(moved.reward[None], jnp.ones(1)))


SMALL = {"num_envs": 4, "group_size": 2, "num_minibatches": 1, "num_epochs": 1, "network": MLP((4,))}


def test_the_host_is_called_once_for_the_rollouts_of_all_rows():
    calls = []

    def on_host(ages, marks):
        calls.append(ages.shape)
        return np.where(ages > 3, 10.0, 0.0).astype(np.float32)

    def ages(states, params):
        shape = jax.ShapeDtypeStruct(states.time.shape, jnp.float32)
        values = jax.pure_callback(on_host, shape, states.time, states.mark, vmap_method="broadcast_all")[:, None]
        return RewardParts(values, jnp.ones_like(values))

    @jax.jit
    @jax.vmap
    def play(key):
        start = standing(plain, known_policy, key, ages=[0, 3], lifetimes=[2, FOREVER])
        simulator = Simulator(plain._replace(outcome=ages), known_policy, known_params((0.0, 0.0)))
        return simulator.unroll(start, key, num_steps=4, auto_reset=False)[0].episode_return

    assert play(jax.random.split(jax.random.key(0), 3)).tolist() == [[2.0, 14.0]] * 3
    assert calls == [(3, 2)]


def test_an_algorithm_sees_the_parts_of_the_steps_and_then_those_of_the_outcome():
    advantage = outcome(decoupled_normalized, reward_part_scores, reward_part_weights)
    config = Config(rewarded._replace(step=with_step_parts), GRPO._replace(advantage=advantage), **SMALL)
    start = standing(config.env, known_policy, jax.random.key(0), ages=[0], lifetimes=[2])
    simulator = Simulator(config.env, known_policy, known_params((0.0, 0.0)))
    unroll = jax.jit(functools.partial(simulator.unroll, num_steps=2, auto_reset=False))
    _, trajectory = jax.device_get(unroll(start, jax.random.key(1)))
    values = trajectory.reward_parts.values[:, 0]
    np.testing.assert_allclose(values, [[1, 0, 0], [1, 2, start.environment.mark[0]]])


def test_evaluated_and_recorded_episodes_have_the_outcome():
    """Also where a class gives it."""
    paying = {"environment": Paying(), "env_params": {"max_steps_in_episode": 4}}
    for config in (Config(environment=rewarded, **SMALL), Config(**paying, **SMALL)):
        state, key = begin(config), jax.random.key(1)
        play = jax.jit(lambda state, key, config=config: evaluate(config, state, key, num_episodes=2).returns)
        assert play(state, key).tolist() == [12.0] * 2
        (steps,) = record_episodes(config, state, key)
        assert steps.returns[:, 0].tolist() == [0, 1, 2, 3, 12]


def test_rollouts_that_continue_episodes_have_no_outcome():
    with pytest.raises(ConfigError, match=r"Probe.*whole episodes.*PPO\._replace\(start=FRESH\)"):
        Config(environment=rewarded, algorithm=PPO, num_envs=4, num_minibatches=1)
    start = standing(rewarded, known_policy, jax.random.key(0), ages=[0], lifetimes=[2])
    simulator = Simulator(rewarded, known_policy, known_params((0.0, 0.0)))
    with pytest.raises(ConfigError, match="use auto_reset=False"):
        jax.eval_shape(lambda: simulator.unroll(start, jax.random.key(0), num_steps=2, auto_reset=True))


def test_an_outcome_of_another_shape_is_an_error():
    def without_parts(states, params):
        return RewardParts(states.mark, states.mark)

    def of_other_steps(states, params):
        values = jnp.zeros((*states.mark.shape, 3, 1))
        return RewardParts(values, values)

    for wrong, shape in ((without_parts, r"float32\[4\]"), (of_other_steps, r"float32\[4, 3, 1\]")):
        with pytest.raises(ConfigError, match=rf"outcome of 'Probe'.*{shape}.*both \[4, K\].*or both \[4, 4, K\]"):
            check(Config(environment=plain._replace(outcome=wrong), **SMALL))

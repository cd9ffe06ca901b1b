"""Start states that are drawn before a rollout and used in turn."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from probes import Probe, bits, known_params, known_policy

from grpo_jax import PPO, Config
from grpo_jax.environments import group_parameters, make_environment
from grpo_jax.errors import ConfigError
from grpo_jax.groups import ANCHORED, forked
from grpo_jax.rollouts.rollout import Simulator

LIMIT, NUM_ENVS, NUM_STEPS = 3, 4, 16  # episodes begin at steps 3, 6, 9, 12 and 15
env = make_environment(Probe(), {"max_steps_in_episode": LIMIT})
KEY = jax.random.key(1)
PPO_FIELDS = {"environment": Probe(), "algorithm": "ppo", "num_envs": 4, "num_steps": 8, "num_minibatches": 1}


@functools.cache
def marks(plan, starts_per_rollout):
    """`[5, B]`: the marks that resets drew for the episodes that began within the rollout."""
    simulator = Simulator(env, known_policy, known_params((0.0, 0.0)), 1.0, plan, starts_per_rollout)

    @jax.jit
    def observed(key):
        state = simulator.reset(group_parameters(env, None, NUM_ENVS, 1), jax.random.key(0), NUM_ENVS)
        return simulator.unroll(state, key, num_steps=NUM_STEPS, auto_reset=True)[1].observation[LIMIT::LIMIT]

    clock, mark = np.moveaxis(observed(KEY), -1, 0)
    assert (clock == 0).all(), "the clock starts again too"
    return mark


def expected_marks(starts_per_rollout):
    """`[5, B]`: resets with the numbers of each environment, in turn."""
    key = jax.random.split(KEY)[0]
    draw = jax.jit(jax.vmap(lambda number: env.reset(jax.random.fold_in(key, number), env.params)[0].mark))
    numbers = np.arange(starts_per_rollout * NUM_ENVS).reshape(-1, NUM_ENVS)
    return np.stack([draw(numbers[n % starts_per_rollout]) for n in range(NUM_STEPS // LIMIT)])


@pytest.mark.parametrize("plan, starts_per_rollout", [("cpu", 1), ("cpu", 2), ("gpu", 2)])
def test_start_states_are_those_of_resets_and_are_used_in_turn(plan, starts_per_rollout):
    begun = marks(plan, starts_per_rollout)
    assert np.array_equal(begun, expected_marks(starts_per_rollout))
    assert np.unique(begun).size == starts_per_rollout * NUM_ENVS, "no other environment has them"


def test_enough_start_states_for_all_episodes_change_nothing():
    assert len({str(bits(marks(*each))) for each in (("cpu", None), ("cpu", 1000), ("gpu", 5))}) == 1


def test_trunks_of_forked_groups_use_theirs_in_turn():
    simulator = Simulator(env, known_policy, known_params((0.0, 0.0)), starts_per_rollout=1)

    @functools.partial(jax.jit, static_argnums=0)
    def begin(trunk_steps):
        state = simulator.reset(group_parameters(env, None, 2, 1), jax.random.key(0), 2)
        return state.observation[:, 1], forked(trunk_steps).begin(simulator, state, KEY, 1).observation[:, 1]

    (first, end), (_, later_end) = begin(LIMIT), begin(2 * LIMIT)
    assert np.array_equal(end, later_end) and not np.array_equal(end, first)


def test_errors_say_where_start_states_are_not_drawn():
    with pytest.raises(ConfigError, match="starts_per_rollout=1 is for rollouts in which an episode follows another"):
        Config(**PPO_FIELDS | {"algorithm": "grpo", "starts_per_rollout": 1})
    with pytest.raises(ConfigError, match="starts_per_rollout=0"):
        Config(**PPO_FIELDS, starts_per_rollout=0)
    anchored = Config(**PPO_FIELDS | {"algorithm": PPO._replace(start=ANCHORED), "starts_per_rollout": 3})
    assert dataclasses.replace(anchored, starts_per_rollout=None).starts_per_rollout is None

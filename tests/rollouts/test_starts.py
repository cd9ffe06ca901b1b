"""Where groups start: members from the same bits, groups apart, actions of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import bits, known_params, known_policy

from grpo_jax import Config, Hyperparams
from grpo_jax.algorithms import GRPO_RETURN_TO_GO
from grpo_jax.environments import group_parameters, make_environment
from grpo_jax.groups import Start, copy_member, keep_begin
from grpo_jax.policies import MLP
from grpo_jax.rollouts.collect import collect
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.training.train_step import initial_state

NUM_GROUPS, GROUP_SIZE, NUM_STEPS = 6, 4, 16
env = make_environment("CartPole-v1", {"max_steps_in_episode": NUM_STEPS})


def fresh(key, num_groups, group_size, env_params=None):
    params = group_parameters(env, env_params, num_groups, group_size)
    return Simulator(env, known_policy, None).reset(params, key, num_groups * group_size, group_size=group_size)


@pytest.fixture(scope="module")
def rollout():
    """The start of a rollout, and the rollout."""

    @jax.jit
    def play(key):
        start = fresh(key, NUM_GROUPS, GROUP_SIZE)
        simulator = Simulator(env, known_policy, known_params((0.0, 0.0), weights=jnp.zeros(4)))
        return start, simulator.unroll(start, key, num_steps=NUM_STEPS, auto_reset=False)[1]

    return play(jax.random.key(5))


def test_members_start_bitwise_equal_and_groups_do_not(rollout):
    start, _ = rollout
    members = [jax.tree.map(lambda leaf, b=b: leaf[b], start) for b in range(NUM_GROUPS * GROUP_SIZE)]
    for b, member in enumerate(members):
        assert bits(member) == bits(members[b // GROUP_SIZE * GROUP_SIZE])
    assert len({str(bits(member)) for member in members}) == NUM_GROUPS


def test_a_group_starts_with_nothing_behind_it(rollout):
    start, _ = rollout
    for leaf in (start.episode_return, start.episode_length, start.policy_carry, start.environment.time):
        assert leaf.shape == (NUM_GROUPS * GROUP_SIZE,) and not leaf.any()
    assert np.array_equal(start.observation[:, 0], start.environment.x)


def test_actions_differ_between_members(rollout):
    _, trajectory = rollout
    actions = trajectory.action.T.reshape(NUM_GROUPS, GROUP_SIZE, NUM_STEPS)
    for group in actions:
        assert len({member.tobytes() for member in np.asarray(group)}) == GROUP_SIZE
    assert np.array_equal(trajectory.observation[0], rollout[0].observation)


# --- a start of the user's own ---------------------------------------------------------------------------------------


def longest_episode(simulator, state, key, group_size):
    return copy_member(state, jnp.argmax(state.episode_length.reshape(-1, group_size), axis=1), group_size)


def test_a_custom_start_chooses_where_groups_begin():
    """Rollouts of two groups of three; the second rollout goes on from the first, or from where that began."""
    sizes = {"num_envs": 6, "group_size": 3, "num_steps": 20, "num_minibatches": 1, "network": MLP((4,))}
    algorithm = GRPO_RETURN_TO_GO._replace(start=Start(longest_episode))
    config = Config(environment="CartPole-v1", algorithm=algorithm, **sizes)
    again = Config("CartPole-v1", algorithm._replace(start=Start(longest_episode, keep_begin)), **sizes)

    @jax.jit
    def two_rollouts(key):
        state = initial_state(config, key, Hyperparams())
        simulator = Simulator(config.env, config.policy, state.params)
        end, _ = collect(config, simulator, state.rollout, key, key)
        return end, collect(config, simulator, end, key, key)[1], collect(again, simulator, end, key, key)[0]

    end, second, kept = jax.tree.map(np.asarray, two_rollouts(jax.random.key(0)))
    assert (np.ptp(end.episode_length.reshape(2, 3), axis=1) > 0).all(), "members have different histories"
    longest = np.argmax(end.episode_length.reshape(2, 3), axis=1) + np.array([0, 3])
    for member in range(3):
        assert np.array_equal(second.observation[0].reshape(2, 3, 4)[:, member], end.observation[longest])
    assert np.array_equal(kept.observation, second.observation[0]), "its own steps are discarded"

"""Starts of groups that a user writes."""

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import Config, Hyperparams
from grpo_jax.algorithms import GRPO_RETURN_TO_GO
from grpo_jax.groups import Start, copy_member, keep_begin
from grpo_jax.policies import MLP
from grpo_jax.rollouts.collect import collect
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.training.train_step import initial_state


def longest_episode(simulator, state, key, group_size):
    return copy_member(state, jnp.argmax(state.episode_length.reshape(-1, group_size), axis=1), group_size)


def test_a_custom_start_chooses_where_groups_begin():
    """Rollouts of two groups of three; the second rollout goes on from the first, or from where that began."""
    sizes = {"num_envs": 6, "group_size": 3, "num_steps": 20, "num_minibatches": 1, "network": MLP((4,))}
    algorithm = GRPO_RETURN_TO_GO._replace(start=Start(longest_episode))
    config = Config(environment="CartPole-v1", algorithm=algorithm, **sizes)
    again = Config(
        environment="CartPole-v1", algorithm=algorithm._replace(start=Start(longest_episode, keep_begin)), **sizes
    )

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

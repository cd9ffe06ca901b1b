"""Whole episodes under fixed parameters."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config.acting import acting_policy
from grpo_jax.config.config import Config
from grpo_jax.environments import EnvParams, group_parameters
from grpo_jax.rollouts.groups import reset_groups
from grpo_jax.rollouts.rollout import unroll
from grpo_jax.types import PyTree, RolloutState, TrainState


class Evaluation(NamedTuple):
    """Episodes played."""

    returns: jax.Array  # [num_episodes] undiscounted
    lengths: jax.Array  # [num_episodes] int32


def evaluate(
    config: Config,
    state: TrainState,
    key: jax.Array,
    *,
    num_episodes: int = 128,
    greedy: bool = False,
    env_params: EnvParams = None,
) -> Evaluation:
    """Plays `num_episodes` whole episodes from independent resets. Pure: `jit` it, `vmap` it over states and keys.

    Where the state's environments differ in their parameters, the episodes are spread evenly over them.

    Args:
      config: of the run that `state` comes from.
      state: whose parameters act, and under whose environment parameters; it is not changed.
      key: of the resets, the environment and the actions.
      num_episodes: how many.
      greedy: take the most probable actions in place of samples; of squashed ones the medians.
      env_params: parameters of the environment by name, in place of the state's: one value for all episodes.
    """
    key_reset, key_rollout = jax.random.split(key)
    start = _start(config, state, key_reset, num_episodes, env_params)
    end, _ = _play(config, state, start, key_rollout, num_steps=config.env.max_steps, greedy=greedy)
    return Evaluation(returns=end.episode_return, lengths=end.episode_length)


class Episode(NamedTuple):
    """One episode, on the host."""

    states: list[PyTree]  # of the environment, before each step
    rewards: np.ndarray  # [length]


def record_episode(config: Config, state: TrainState, key: jax.Array, *, greedy: bool = False) -> Episode:
    """Plays one episode and keeps the environment's states, to draw them."""

    @jax.jit
    def play(state, key):
        key_reset, key_rollout = jax.random.split(key)
        start = _start(config, state, key_reset, 1)

        def step(rollout, key):
            after, trajectory = _play(config, state, rollout, key, num_steps=1, greedy=greedy)
            return after, (rollout.environment, trajectory.reward[0, 0], trajectory.ended[0, 0])

        return jax.lax.scan(step, start, jax.random.split(key_rollout, config.env.max_steps))[1]

    states, rewards, ended = jax.tree.map(np.asarray, play(state, key))
    length = int(np.argmax(ended)) + 1 if ended.any() else len(ended)
    leaves, structure = jax.tree.flatten(states)
    return Episode([structure.unflatten(leaf[t, 0] for leaf in leaves) for t in range(length)], rewards[:length])


def _start(
    config: Config, state: TrainState, key: jax.Array, num_episodes: int, env_params: EnvParams = None
) -> RolloutState:
    which = jnp.arange(num_episodes) * config.num_envs // num_episodes
    environment_params = jax.tree.map(lambda leaf: leaf[which], state.rollout.environment_params)
    replaced = group_parameters(config.env, env_params, num_episodes, 1)
    environment_params |= {name: replaced[name] for name in env_params or {}}
    return reset_groups(config.policy, state.params, config.env, environment_params, key, num_episodes, group_size=1)


def _play(config: Config, state: TrainState, rollout: RolloutState, key: jax.Array, *, num_steps: int, greedy: bool):
    policy = acting_policy(config, state.normalizer, state.hyperparams)
    return unroll(policy, config.env, state.params, rollout, key, num_steps=num_steps, auto_reset=False, greedy=greedy)

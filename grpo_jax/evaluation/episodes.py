"""Whole episodes under fixed parameters."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config.acting import acting_policy
from grpo_jax.config.config import Config
from grpo_jax.environments import EnvParams, group_parameters
from grpo_jax.environments.frame_stack import unstacked_state
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.types import PyTree, TrainState


class Evaluation(NamedTuple):
    """Returns and lengths of whole episodes."""

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
      config: the config of the run that `state` comes from.
      state: the policy, and the parameters of the environments.
      key: of the resets, the environment and the actions.
      num_episodes: number of episodes.
      greedy: take the most probable actions instead of samples, or for squashed actions the medians.
      env_params: parameters of the environment by name, instead of the state's: one value for all episodes.
    """
    key_reset, key_rollout = jax.random.split(key)
    simulator = _simulator(config, state)
    start = simulator.reset(_environment_params(config, state, num_episodes, env_params), key_reset, num_episodes)
    end, _ = simulator.unroll(start, key_rollout, num_steps=config.env.max_steps, auto_reset=False, greedy=greedy)
    return Evaluation(returns=end.episode_return, lengths=end.episode_length)


class Episode(NamedTuple):
    """One episode, on the host."""

    states: list[PyTree]  # of the environment itself, without stacked frames, one before each step
    rewards: np.ndarray  # [length]


def record_episode(config: Config, state: TrainState, key: jax.Array, *, greedy: bool = False) -> Episode:
    """Plays one episode and keeps the environment's states, to draw them."""

    @jax.jit
    def play(state, key):
        key_reset, key_rollout = jax.random.split(key)
        simulator = _simulator(config, state)
        start = simulator.reset(_environment_params(config, state, num_episodes=1), key_reset, num_envs=1)

        def step(rollout, key):
            after, trajectory = simulator.unroll(rollout, key, num_steps=1, auto_reset=False, greedy=greedy)
            return after, (unstacked_state(rollout.environment), trajectory.reward[0, 0], trajectory.ended[0, 0])

        return jax.lax.scan(step, start, jax.random.split(key_rollout, config.env.max_steps))[1]

    states, rewards, ended = jax.tree.map(np.asarray, play(state, key))
    length = int(np.argmax(ended)) + 1 if ended.any() else len(ended)
    leaves, structure = jax.tree.flatten(states)
    return Episode([structure.unflatten(leaf[t, 0] for leaf in leaves) for t in range(length)], rewards[:length])


def _simulator(config: Config, state: TrainState) -> Simulator:
    policy = acting_policy(config, state.normalizer, state.hyperparams)
    # Few parts of the trajectory are read, and a compiler leaves out the others, unless they are packed with these.
    plan = dataclasses.replace(config.plan, packed_steps=False)
    return Simulator(config.env, policy, state.params, plan=plan)


def _environment_params(
    config: Config, state: TrainState, num_episodes: int, env_params: EnvParams = None
) -> dict[str, jax.Array]:
    """The parameters in the state, spread evenly over the episodes, with `env_params` in place of some."""
    which = jnp.arange(num_episodes) * config.num_envs // num_episodes
    environment_params = jax.tree.map(lambda leaf: leaf[which], state.rollout.environment_params)
    replaced = group_parameters(config.env, env_params, num_episodes, 1)
    return environment_params | {name: replaced[name] for name in env_params or {}}

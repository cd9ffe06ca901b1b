"""Whole episodes under fixed parameters."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config import Config
from grpo_jax.environments import EnvParams, parameters_of_groups
from grpo_jax.environments.tokens import accuracy, well_formed
from grpo_jax.errors import ConfigError
from grpo_jax.groups import reset_groups
from grpo_jax.rollout import unroll
from grpo_jax.sampling import acting_policy
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


class Answers(NamedTuple):
    """Completions of `N` prompts of a token task, `K` of each."""

    prompts: jax.Array  # [N, P], -1 where there is no token
    completions: jax.Array  # [N, K, max_steps], -1 after the end
    correct: jax.Array  # [N, K] bool
    well_formed: jax.Array  # [N, K] bool: in the task's format, right or wrong


def answer(
    config: Config,
    params: PyTree,
    key: jax.Array,
    *,
    num_prompts: int = 128,
    num_samples: int = 1,
    greedy: bool = False,
    env_params: EnvParams = None,
) -> Answers:
    """Answers a token task, whatever its rewards, and says which answers are right. Pure: `jit` it, `vmap` it.

    Args:
      config: of an environment such as "tokens:sort-5".
      params: of the policy, such as `state.params`. It samples at temperature 1, from all tokens.
      key: of prompts and completions.
      num_prompts, num_samples: prompts, and completions of each.
      greedy: take the most probable tokens in place of samples.
      env_params: in place of the config's, such as `{"held_out": 1}` for prompts that training never draws.

    Raises:
      ConfigError: the environment is not made of a token task.
    """
    env, task = config.env, config.env.task
    if task is None:
        raise ConfigError(f"{env.name!r} is no token task, so its answers are neither right nor wrong; use evaluate")
    num_texts = num_prompts * num_samples
    key_reset, key_rollout = jax.random.split(key)
    environment_params = parameters_of_groups(env, env_params, num_prompts, num_samples)
    policy = config.policy._replace(has_critic=False)
    start = reset_groups(policy, params, env, environment_params, key_reset, num_texts, num_samples)
    end, _ = unroll(policy, env, params, start, key_rollout, num_steps=env.max_steps, auto_reset=False, greedy=greedy)
    problem, tokens = end.environment.problem, end.environment.tokens
    correct, formed = (
        (jax.vmap(functools.partial(judge, task))(problem, tokens) > 0).reshape(num_prompts, num_samples)
        for judge in (accuracy, well_formed)
    )
    return Answers(
        prompts=jax.vmap(task.prompt)(problem)[::num_samples],
        completions=tokens.reshape(num_prompts, num_samples, -1),
        correct=correct,
        well_formed=formed,
    )


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
    replaced = parameters_of_groups(config.env, env_params, num_episodes, 1)
    environment_params |= {name: replaced[name] for name in env_params or {}}
    return reset_groups(config.policy, state.params, config.env, environment_params, key, num_episodes, group_size=1)


def _play(config: Config, state: TrainState, rollout: RolloutState, key: jax.Array, *, num_steps: int, greedy: bool):
    policy = acting_policy(config, state.normalizer, state.hyperparams)
    return unroll(policy, config.env, state.params, rollout, key, num_steps=num_steps, auto_reset=False, greedy=greedy)

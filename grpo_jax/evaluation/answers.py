"""Answers of a policy to the problems of a token task, and whether they are correct."""

import functools
from typing import NamedTuple

import jax

from grpo_jax.config import Config, kept_with
from grpo_jax.environments import EnvParams, group_parameters
from grpo_jax.environments.tokens import accuracy, well_formed
from grpo_jax.errors import ConfigError
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.types import PyTree


class Answers(NamedTuple):
    """Completions of `N` prompts of a token task, `K` of each."""

    prompts: jax.Array  # [N, P], -1 for padding
    completions: jax.Array  # [N, K, max_steps], -1 after the end
    correct: jax.Array  # [N, K] bool
    well_formed: jax.Array  # [N, K] bool: in the task's format, correct or not


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
    """Samples answers to prompts of a token task and scores them. Pure: `jit` it, `vmap` it.

    Args:
      config: the config of an environment such as "tokens:sort-5".
      params: parameters of the policy, such as `state.params`. It samples at temperature 1, from all tokens.
      key: of prompts and completions.
      num_prompts, num_samples: number of prompts, and of completions of each.
      greedy: take the most probable tokens instead of samples.
      env_params: instead of the config's, such as `{"held_out": 1}` for prompts that training never draws.

    Raises:
      ConfigError: the environment is not a token task.
    """
    env, task = config.env, config.env.task
    if task is None:
        raise ConfigError(f"{env.name!r} is not a token task, so it has no correct answers; use evaluate")

    def play(params, environment_params, key):
        simulator = Simulator(env, config.policy._replace(has_critic=False), params, plan=config.plan)
        count = num_prompts * num_samples
        end, _ = simulator.play(environment_params, key, count, group_size=num_samples, greedy=greedy)
        problem, tokens = end.environment.problem, end.environment.tokens
        scores = (jax.vmap(functools.partial(score, task))(problem, tokens) for score in (accuracy, well_formed))
        completions, prompts = tokens.reshape(num_prompts, num_samples, -1), jax.vmap(task.prompt)(problem)
        return Answers(
            prompts[::num_samples], completions, *(each.reshape(completions.shape[:2]) > 0 for each in scores)
        )

    program = kept_with(config, ("answer", num_prompts, num_samples, greedy), lambda: jax.jit(play, inline=True))
    return program(params, group_parameters(env, env_params, num_prompts, num_samples), key)

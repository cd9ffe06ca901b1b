"""Completions of chosen prompts of a language task, to be read and to be scored."""

import jax
import jax.numpy as jnp

from grpo_jax.config import Config, behaviour_policy
from grpo_jax.language.environment import begin
from grpo_jax.language.task import LanguageTask
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.types import TrainState


def sample_completions(
    config: Config,
    task: LanguageTask,
    state: TrainState,
    prompts: jax.Array,
    key: jax.Array,
    *,
    num_samples: int = 1,
    greedy: bool = False,
) -> jax.Array:
    """Completes prompts as rollouts do, without rewards. Pure: `jit` it, `vmap` it over states and keys.

    Args:
      config: of the environment of the task.
      task: has the prompts.
      state: the policy.
      prompts: int `[N]`, indices in the task's `tokens`.
      key: of the samples.
      num_samples: `K`, completions of each prompt.
      greedy: take the most probable tokens instead of samples.

    Returns:
      int32 `[N, K, max_completion]`, -1 after the end.
    """
    prompts = jnp.repeat(jnp.asarray(prompts, jnp.int32), num_samples)

    policy = behaviour_policy(config, state.normalizer, state.hyperparams)._replace(has_critic=False)
    env = config.env._replace(reset=lambda key, params: begin(task, params["prompt"]), outcome=None)
    simulator = Simulator(env, policy, state.params, plan=config.plan)
    key_reset, key_steps = jax.random.split(key)
    params = {name: jnp.broadcast_to(value, prompts.shape) for name, value in env.params.items()}
    start = simulator.reset(params | {"prompt": prompts}, key_reset, len(prompts), group_size=num_samples)
    end, _ = simulator.unroll(
        start, key_steps, num_steps=env.max_steps, auto_reset=False, from_reset=True, greedy=greedy
    )
    return end.environment.tokens.reshape(-1, num_samples, env.max_steps)

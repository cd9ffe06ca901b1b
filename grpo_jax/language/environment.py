"""The environment of a language task: a reset draws a prompt, an action is the next token."""

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.environments import Environment
from grpo_jax.environments.environment import transition
from grpo_jax.environments.spaces import Discrete
from grpo_jax.environments.tokens import Completion
from grpo_jax.host_calls import call_host
from grpo_jax.language.task import LanguageTask
from grpo_jax.types import RewardParts


def begin(task: LanguageTask, prompt: jax.Array) -> tuple[Completion, jax.Array]:
    """The state before a completion, whose problem is a prompt's index, and the first observation: its last token."""
    return Completion.empty(prompt, task.max_completion), jnp.asarray(task.tokens)[prompt, -1]


def language_environment(task: LanguageTask) -> Environment:
    """The environment of a task. An episode is one completion, which an end token of the model terminates.

    Its traced parameters are the weight of each reward, by the reward's name, and `held_out`: with 0 a reset draws from
    the prompts to train on, with 1 from the held-out ones (or from all, if none is held out). Rewards are known
    when a completion has ended: `outcome` calls the host once for all completions of a rollout.

    Args:
      task: prompts, rewards and the model.
    """
    prompts = jnp.asarray(task.tokens)
    end_tokens = jnp.array(task.model.tokenizer.end_tokens, jnp.int32)
    training = 0, task.num_training
    held_out = 0 if task.held_out is None else task.num_training, len(task.tokens)

    def reset(key, params):
        first, end = jnp.where(params["held_out"] > 0, jnp.array(held_out), jnp.array(training))
        return begin(task, jax.random.randint(key, (), first, end))

    def step(key, state, action, params):
        action = jnp.asarray(action, jnp.int32)
        after = state.append(action)
        terminated = jnp.any(action == end_tokens)
        return transition(after, action, 0.0, terminated, after.length >= task.max_completion)

    def outcome(states, params):
        shape = states.tokens.shape if task.process_rewards else states.length.shape
        values = jax.ShapeDtypeStruct((*shape, len(task.rewards)), jnp.float32)
        results = (values, jax.ShapeDtypeStruct(shape, bool)) if task.process_rewards else values
        found = call_host(task.score_in_callback, results, states.problem, states.tokens)
        weights = jnp.stack([params[reward.name] for reward in task.rewards], axis=-1)
        if not task.process_rewards:
            return RewardParts(found, weights)
        values, judged = found
        return RewardParts(values, jnp.broadcast_to(weights[..., None, :], values.shape), judged)

    return Environment(
        name=f"language:{task.digest}",
        reset=reset,
        step=step,
        params={"held_out": np.int32(0)} | {reward.name: np.float32(reward.weight) for reward in task.rewards},
        observation=jax.ShapeDtypeStruct((), jnp.int32),
        action_space=Discrete(task.model.num_tokens),
        action_mask=None,
        max_steps=task.max_completion,
        limit_terminates=True,  # a completion that is cut has been rewarded
        prompt=lambda state, params: prompts[state.problem, :-1],
        on_host=True,
        outcome=outcome,
    )

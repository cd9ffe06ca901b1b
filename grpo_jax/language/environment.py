"""The environment of a language task: a reset draws a prompt, an action is the next token."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.environments import Environment
from grpo_jax.environments.environment import transition
from grpo_jax.environments.spaces import Discrete
from grpo_jax.environments.tokens import Completion
from grpo_jax.evaluation.generation import follow_stops
from grpo_jax.host_calls import call_host
from grpo_jax.language.task import LanguageTask
from grpo_jax.types import RewardParts


def language_environment(task: LanguageTask) -> Environment:
    """The environment of a task. An episode is one completion, which an end token of the model terminates, or a
    stop string in its text.

    Its traced parameters are the weight of each reward, by the reward's name, and `held_out`: with 0 a reset draws from
    the prompts to train on, with 1 from the held-out ones (or from all, if none is held out). Rewards are known when a
    completion has ended: `outcome` calls the host once for all completions of a rollout.

    The tokens of the prompts come from the host too, and not from the compiled program, which hence serves all prompts
    of the same number and length.
    """
    row = jax.ShapeDtypeStruct(task.tokens.shape[1:], jnp.int32)
    end_tokens = jnp.array(task.model.tokenizer.end_tokens, jnp.int32)
    training = 0, task.num_training
    held_out = 0 if task.held_out is None else task.num_training, len(task.tokens)
    file = task.prompts.sources[0].rpartition(", line ")[0]
    name = f"{task.model.folder.resolve().name} with {Path(file).name or 'prompts'}"

    def tokens_of(prompt):
        return call_host(task.tokens_of, row, prompt)

    def start(prompt):
        found = jnp.zeros(len(task.stop_strings), jnp.int32) if task.stop_strings else ()
        return Completion.empty(prompt, task.max_completion)._replace(found=found)

    def reset(key, params):
        first, end = jnp.where(params["held_out"] > 0, jnp.array(held_out), jnp.array(training))
        prompt = jax.random.randint(key, (), first, end)
        return start(prompt), tokens_of(prompt)[-1]  # the first observation is the prompt's last token

    def step(key, state, action, params):
        action = jnp.asarray(action, jnp.int32)
        state = state.append(action)
        is_end = jnp.any(action == end_tokens)
        if task.stop_strings:
            found, is_stop = follow_stops(task.stops, state.found, action)
            state, is_end = state._replace(found=found), is_end | is_stop
        return transition(state, action, 0.0, is_end, state.length >= task.max_completion)

    def outcome(states, params):
        shape = *(states.tokens if task.process_rewards else states.length).shape, len(task.rewards)
        results = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, bool)
        values, rewarded = call_host(task.score_in_callback, results, states.problem, states.tokens)
        weights = jnp.stack([params[reward.name] for reward in task.rewards], axis=-1)
        weights = weights[..., None, :] if task.process_rewards else weights
        return RewardParts(values, jnp.broadcast_to(weights, values.shape), rewarded)

    return Environment(
        name=name,
        reset=reset,
        step=step,
        params={"held_out": np.int32(0)} | {reward.name: np.float32(reward.weight) for reward in task.rewards},
        observation=jax.ShapeDtypeStruct((), jnp.int32),
        action_space=Discrete(task.model.num_tokens),
        action_mask=None,
        max_steps=task.max_completion,
        limit_terminates=True,  # a completion that is cut has been rewarded
        prompt=lambda state, params: tokens_of(state.problem)[:-1],
        on_host=True,
        outcome=outcome,
        reward_names=tuple(reward.name for reward in task.rewards),
        step_word="tokens",
    )

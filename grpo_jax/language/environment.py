"""The environment of a language task: the host chooses prompts, an action is the next token, the host rewards."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.environments import Environment
from grpo_jax.environments.environment import HostSide, transition
from grpo_jax.environments.spaces import Discrete
from grpo_jax.environments.tokens import PAD, Completion
from grpo_jax.evaluation.generation import follow
from grpo_jax.language.prompts import rounds
from grpo_jax.language.task import LanguageTask
from grpo_jax.types import RewardParts


def language_environment(task: LanguageTask) -> Environment:
    """The environment of a task. An episode is one completion, which an end token of the model terminates, or a
    stop string in its text.

    Its traced parameters are the prompt of each group, `prompt`, its index, and `prompt_tokens`, which the host chooses
    before each iteration, all prompts before any comes again, `iteration`, and the weight of each reward, by its name.

    Rewards are known when the completions of an iteration have ended, and the host gives them too. So the compiled
    programs hold no prompt, and serve all of the same length. With `respond` there are also `answers`: see `turns`.
    """
    has_turns = task.respond is not None
    end_tokens = jnp.array(task.model.tokenizer.end_tokens, jnp.int32)
    file = task.prompts.sources[0].rpartition(", line ")[0]
    name = f"{task.model.folder.resolve().name} with {Path(file).name or 'prompts'}"

    def reset(key, params):
        state = Completion.empty(params["prompt"], task.max_completion)
        found = jnp.zeros(len(task.stop_strings), jnp.int32) if task.stop_strings else ()
        return state._replace(found=found), params["prompt_tokens"][-1]  # the first observation is its last token

    def step(key, state, action, params):
        action = jnp.asarray(action, jnp.int32)
        answers = params.get("answers")
        found, is_end = follow(end_tokens, task.stops, answers, state.found, state.length, action)
        state = state.append(action)._replace(found=found)
        return transition(state, action, 0.0, is_end, state.length >= task.max_completion)

    def choose(keys, iteration, num_groups):
        task.conversations.messages_of.clear()
        seeds = np.asarray(jax.random.key_data(keys))
        prompt = np.stack([rounds(seed, task.num_training, num_groups, iteration) for seed in seeds])
        answers = {"answers": np.full((*prompt.shape, task.max_completion), PAD, np.int32)} if has_turns else {}
        made = np.full(prompt.shape, iteration, np.int32)
        return {"prompt": prompt, "prompt_tokens": task.tokens[prompt], "iteration": made, **answers}

    def again(states, params):
        answers = task.conversations.answer(*map(np.asarray, (states.problem, states.tokens, params["answers"])))
        return None if answers is None else {"answers": answers}

    def outcome(states, params):
        given = {"answers": params.get("answers"), "iteration": params["iteration"]}
        values, rewarded = task.judge(states.problem, states.tokens, steps=task.process_rewards, **given)
        weights = np.stack([params[reward.name] for reward in task.rewards], axis=-1)
        weights = weights[..., None, :] if task.process_rewards else weights
        return RewardParts(values, np.broadcast_to(weights, values.shape), rewarded)

    return Environment(
        name=name,
        reset=reset,
        step=step,
        params={
            **{"iteration": np.int32(0), "prompt": np.int32(0), "prompt_tokens": np.zeros_like(task.tokens[0])},
            **({"answers": np.full(task.max_completion, PAD, np.int32)} if has_turns else {}),
            **{reward.name: np.float32(reward.weight) for reward in task.rewards},
        },
        observation=jax.ShapeDtypeStruct((), jnp.int32),
        action_space=Discrete(task.model.num_tokens),
        action_mask=None,
        max_steps=task.max_completion,
        limit_terminates=True,  # a completion that is cut has been rewarded
        prompt=lambda state, params: params["prompt_tokens"][:-1],
        host=HostSide(choose, outcome, again if has_turns else None, task.process_rewards),
        forced_action=(lambda state, params: params["answers"][state.length]) if has_turns else None,
        reward_names=tuple(reward.name for reward in task.rewards),
        step_word="tokens",
    )

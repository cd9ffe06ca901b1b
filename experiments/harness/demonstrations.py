"""Supervised learning from demonstrations: texts with the text of their completions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config import Config
from grpo_jax.environments import group_parameters
from grpo_jax.environments.tokens import PAD
from grpo_jax.errors import ConfigError
from grpo_jax.language.prompts import Prompts
from grpo_jax.language.task import LanguageTask
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.runs.imitation import NUM_ANSWERS, WarmStart, completion_loss, imitate
from grpo_jax.types import PyTree


def learn_demonstrations(
    config: Config,
    task: LanguageTask,
    demonstrations: Prompts,
    keys: jax.Array,
    *,
    batch_size: int = 128,
    **options: Any,
) -> WarmStart:
    """Trains one new policy for each key on demonstrations, until enough sampled completions are correct.

    The loss is the mean of -log p(token) over the tokens of the completions and their end tokens, without the prompts.
    The accuracy is the mean of the task's first reward over sampled completions of its training prompts.

    Args:
      config: of the environment of the task.
      task: has the tokenizer, the prompts and the rewards.
      demonstrations: prompts with a field `completion`, the text to learn.
      keys: `[R]`, one for the initial weights and all randomness of each row.
      batch_size: demonstrations in each gradient step.
      options: `target`, `learning_rate` and `max_updates`: see `imitate`.

    Raises:
      ConfigError: the demonstrations have no completions, or one is longer than `max_completion`.
    """
    prompts, completions = map(jnp.asarray, demonstration_tokens(task, demonstrations))

    def loss(params: PyTree, key: jax.Array) -> jax.Array:
        rows = jax.random.randint(key, (batch_size,), 0, len(prompts))
        carry = config.policy.initial_carry(params, batch_size, prompts[rows, :-1])
        return completion_loss(config.policy, params, carry, prompts[rows, -1], completions[rows])

    def accuracy(params: PyTree, key: jax.Array) -> jax.Array:
        simulator = Simulator(config.env, config.policy._replace(has_critic=False), params, plan=config.plan)
        _, trajectory = simulator.play(group_parameters(config.env, None, NUM_ANSWERS, 1), key, NUM_ANSWERS)
        return trajectory.reward_parts.values[..., 0].sum(axis=0).mean()

    return imitate(config, keys, loss, accuracy, **options)


def demonstration_tokens(task: LanguageTask, demonstrations: Prompts) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of demonstrations: int32 prompts `[N, P]`, padded on the left, and completions `[N, L]`, on the right.

    A completion ends with the first end token of the model.
    """
    sources, tokenizer = demonstrations.sources, task.model.tokenizer
    texts = demonstrations.fields.get("completion", [None] * len(sources))
    for text, source in zip(texts, sources, strict=True):
        if not isinstance(text, str):
            raise ConfigError(f"{source}: the completion is {text!r:.200}; write a text, in a field `completion`")
    encoded = (tokenizer.backend.encode(text, add_special_tokens=False).ids for text in texts)
    rows = [[*tokens, tokenizer.end_tokens[0]] for tokens in encoded]
    longest = max(range(len(rows)), key=lambda index: len(rows[index]))
    if len(rows[longest]) > task.max_completion:
        count = f"{sources[longest]}: the completion has {len(rows[longest])} tokens with its end"
        raise ConfigError(f"{count}, more than max_completion={task.max_completion}; raise that, or leave it out")
    padded = [row + [PAD] * (len(rows[longest]) - len(row)) for row in rows]
    return task.model.encode(demonstrations, task.max_completion), np.array(padded, np.int32)

"""Rewards of completions: functions (task, problem, completion) -> float, and DAPO's punishment of overlong ones."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.environments.tokens.task import END, PAD, Problem, Reward, Task, Tokens, text
from grpo_jax.host_calls import call_host
from grpo_jax.precision import at_least_float32


def accuracy(task: Task, problem: Problem, completion: Tokens) -> jax.Array:
    """1 for a correct completion, else 0."""
    if task.correct is None:
        return jnp.float32(jnp.all(completion == task.solution(problem)))
    return jnp.float32(task.correct(problem, completion))


def well_formed(task: Task, problem: Problem, completion: Tokens) -> jax.Array:
    """1 for a completion in the task's format, correct or not, else 0."""
    if task.well_formed is None:
        return jnp.float32(jnp.any(completion == END))
    return jnp.float32(task.well_formed(problem, completion))


def progress(task: Task, problem: Problem, completion: Tokens) -> jax.Array:
    """How much of the solution a partial completion has, in [0, 1]: partial credit, or a reward for each step.

    By default the share of the solution's tokens that the completion has at the same position.
    """
    if task.progress is not None:
        return jnp.float32(task.progress(problem, completion))
    solution = task.solution(problem)
    is_token = solution != PAD
    return jnp.sum((completion == solution) & is_token) / jnp.maximum(jnp.sum(is_token), 1)


def overlong(buffer: float) -> Callable:
    """A reward that falls from 0 to -1 over the last `buffer` tokens: see `overlong_punishment`."""

    def reward(task: Task, problem: Problem, completion: Tokens) -> jax.Array:
        return overlong_punishment(jnp.sum(completion != PAD), max_length=task.max_length, buffer=buffer)

    return reward


def overlong_punishment(lengths: jax.Array, *, max_length: float, buffer: float) -> jax.Array:
    """A penalty that grows linearly over the last `buffer` steps before the limit; add it to the score.

        0                                       if length <= max_length - buffer
        (max_length - buffer - length) / buffer up to max_length
        -1                                      beyond

    DAPO's soft overlong punishment (https://arxiv.org/abs/2503.14476, equation 13).

    Args:
      lengths: number of steps in each rollout, any shape.
      max_length: the limit, in steps.
      buffer: width of the ramp, in steps; 0 punishes only what exceeds the limit.

    Returns:
      The same shape, in [-1, 0].
    """
    excess = at_least_float32(lengths) - (max_length - buffer)
    # Lengths are integers, so a ramp of half a step is the same as none.
    return -jnp.clip(excess / jnp.maximum(buffer, 0.5), 0.0, 1.0)


def gated(reward: Callable, gate: Callable) -> Callable:
    """The product of two rewards: 0 wherever the gate is 0."""
    return lambda task, problem, completion: gate(task, problem, completion) * reward(task, problem, completion)


def text_reward(function: Callable[[str, str], float]) -> Callable:
    """A reward that cannot be traced: calls `function(prompt, completion)` with two strings on the host.

    The strings do not contain the end tokens, so a truncated completion looks like any other. XLA may call the function
    more than once, or not at all if its value is not needed.
    """

    def reward(task: Task, problem: Problem, completion: Tokens) -> jax.Array:
        def score(prompts, completions):  # [..., P] and [..., max_length]
            rows = zip(*(np.reshape(x, (-1, np.shape(x)[-1])) for x in (prompts, completions)), strict=True)
            texts = [(text(task, prompt), text(task, row).removesuffix(task.vocabulary[END])) for prompt, row in rows]
            return np.array([function(*each) for each in texts], np.float32).reshape(np.shape(completions)[:-1])

        return call_host(score, jax.ShapeDtypeStruct((), jnp.float32), task.prompt(problem), completion)

    return reward


ACCURACY = Reward("accuracy", accuracy)
FORMAT = Reward("format", well_formed, weight=0.1)
PROGRESS = Reward("progress", progress, process=True)

"""A token task: problems, prompts, solutions, rewards; and helpers for writing one."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.precision import at_least_float32

# Tokens in every vocabulary.
END = 0  # the end of a completion
ASK = 1  # the end of a prompt
DIGITS = 2  # the digit 0, which the others follow
PAD = -1  # padding: no token

VOCABULARY = "$=0123456789"
"""The characters of `END`, `ASK` and the digits; a task appends its own."""

Tokens = jax.Array
Problem = Any


class Reward(NamedTuple):
    """One part of a task's reward, which is the weighted sum of its parts."""

    name: str  # also names the environment's traced parameter with the weight
    function: Callable  # (task, problem, completion [max_length]) -> float
    weight: float = 1.0
    process: bool = False  # each step's reward is the increase of the function; otherwise the last step's is all of it


class Task(NamedTuple):
    """A task as pure functions of one problem. Completions and solutions end in `END`, followed by `PAD`."""

    name: str
    vocabulary: str  # a character for each token; the first two are `END` and `ASK`
    max_length: int  # of a completion, including `END`; at this length without `END` it is truncated
    draw: Callable  # (key) -> problem, any pytree
    prompt: Callable  # (problem) -> int32 [P], without `ASK`; `PAD` may be anywhere
    solution: Callable  # (problem) -> int32 [max_length]: a correct completion
    correct: Callable | None = None  # (problem, completion) -> bool; None: only the solution is correct
    well_formed: Callable | None = None  # (problem, completion) -> bool; None: any completion with an `END`
    rewards: tuple[Reward, ...] = ()  # (): only `ACCURACY`
    forced_token: Callable | None = None  # (problem, completion so far) -> the task's own next token; `PAD`: none


def text(task: Task, tokens: Tokens) -> str:
    """Tokens of any shape as a string; runs on the host."""
    return "".join(task.vocabulary[token] for token in np.ravel(tokens) if token != PAD)


def join(length: int, *parts: Tokens | int) -> Tokens:
    """Concatenates the parts and moves all `PAD` to the end: `[length]`."""
    tokens = jnp.concatenate([jnp.atleast_1d(jnp.asarray(part, jnp.int32)) for part in parts])
    tokens = tokens[jnp.argsort(tokens == PAD, stable=True)][:length]
    return jnp.pad(tokens, (0, length - tokens.shape[0]), constant_values=PAD)


def digits(number: jax.Array, width: int) -> Tokens:
    """The decimal digits of a number from 0 to 10**width - 1: `[width]`, `PAD` instead of leading zeros."""
    powers = 10 ** jnp.arange(width - 1, -1, -1)
    is_digit = (number >= powers) | (powers == 1)
    return jnp.where(is_digit, DIGITS + number // powers % 10, PAD)


def in_digits(problem: Problem, completion: Tokens) -> jax.Array:
    """Whether a completion is one or more digits followed by `END`."""
    length = jnp.sum(completion != PAD)
    is_digit = (completion >= DIGITS) & (completion < DIGITS + 10)
    return (length > 1) & (completion[length - 1] == END) & (jnp.sum(is_digit) == length - 1)


# --- rewards: functions (task, problem, completion) -> float ----------------------------------------------------------


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
    """The share of the solution's tokens that a completion has at their places: partial credit."""
    solution = task.solution(problem)
    is_token = solution != PAD
    return jnp.sum((completion == solution) & is_token) / jnp.maximum(jnp.sum(is_token), 1)


def gated(reward: Callable, gate: Callable) -> Callable:
    """The product of two rewards: 0 wherever the gate is 0."""
    return lambda task, problem, completion: gate(task, problem, completion) * reward(task, problem, completion)


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


ACCURACY = Reward("accuracy", accuracy)  # 1 for a correct completion
FORMAT = Reward("format", well_formed, weight=0.1)  # 0.1 for one in the task's format, correct or not
PROGRESS = Reward("progress", progress, process=True)  # at each step, by how much more of the solution is there

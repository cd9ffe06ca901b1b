"""What a token task is: problems, their prompts, and which completions are right."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.environments.tokens.rewards import exact_match, on_host, overlong_punishment, partial_credit

END, ASK, DIGITS = 0, 1, 2
"""Tokens of every vocabulary: the end of a completion, the end of a prompt, and where `VOCABULARY`'s digits begin."""

PAD = -1
"""No token."""

VOCABULARY = "$=0123456789"
"""What `digits` writes in; a task adds characters of its own behind."""

Tokens = jax.Array
Problem = Any


class Reward(NamedTuple):
    """One part of a task's reward, which is their weighted sum."""

    name: str  # also of the environment's traced parameter that is its weight
    function: Callable  # (task, problem, completion [max_length]) -> float
    weight: float = 1.0
    process: bool = False  # paid step by step, each step what it adds; otherwise once, at the end


class Task(NamedTuple):
    """A task as pure functions of one problem. Completions and solutions end in `END` and then hold `PAD`."""

    name: str
    vocabulary: str  # a character for each token, `END`'s and `ASK`'s first
    max_length: int  # of a completion, with its end; one that gets there without is truncated
    draw: Callable  # (key) -> problem, any pytree
    prompt: Callable  # (problem) -> int32 [P], `ASK` left out, `PAD` wherever there is no token
    solution: Callable  # (problem) -> int32 [max_length]: a right completion
    correct: Callable | None = None  # (problem, completion) -> bool; None: only the solution is
    well_formed: Callable | None = None  # (problem, completion) -> bool; None: whatever ends itself
    progress: Callable | None = None  # (problem, completion so far) -> [0, 1]; None: the share of the solution
    rewards: tuple[Reward, ...] = ()  # () for `ACCURACY` alone


# --- rewards: any function of (task, problem, completion) is one -----------------------------------------------------


def accuracy(task: Task, problem: Problem, completion: Tokens) -> jax.Array:
    """1 for a right completion, else 0."""
    if task.correct is None:
        return exact_match(completion, task.solution(problem))
    return jnp.float32(task.correct(problem, completion))


def well_formed(task: Task, problem: Problem, completion: Tokens) -> jax.Array:
    """1 for a completion in the task's format, right or wrong, else 0."""
    if task.well_formed is None:
        return jnp.float32(jnp.any(completion == END))
    return jnp.float32(task.well_formed(problem, completion))


def progress(task: Task, problem: Problem, completion: Tokens) -> jax.Array:
    """How much of the way a completion has gone, in [0, 1]: partial credit, or, as a process reward, for each step."""
    if task.progress is None:
        return partial_credit(completion, task.solution(problem))
    return jnp.float32(task.progress(problem, completion))


def overlong(buffer: float) -> Callable:
    """A reward in [-1, 0] that falls over the last `buffer` tokens before the limit (`rewards.overlong_punishment`)."""

    def reward(task: Task, problem: Problem, completion: Tokens) -> jax.Array:
        length = jnp.sum(completion != PAD)
        return overlong_punishment(length, max_length=task.max_length, buffer=buffer)

    return reward


def gated(reward: Callable, gate: Callable) -> Callable:
    """The product of two rewards: nothing is earned where the gate is 0."""
    return lambda task, problem, completion: gate(task, problem, completion) * reward(task, problem, completion)


def of_text(function: Callable[[str, str], float]) -> Callable:
    """A reward that cannot be traced: `function(prompt, completion)` of two strings, called on the host.

    Both come without the tokens that end them. A completion that was cut off is given like any other.
    """

    def reward(task: Task, problem: Problem, completion: Tokens) -> jax.Array:
        def judge(prompt, completion):
            if np.all(completion == PAD):  # steps that do not end an episode
                return 0.0
            return function(text(task, prompt), text(task, completion).removesuffix(task.vocabulary[END]))

        return on_host(judge, task.prompt(problem), completion)

    return reward


ACCURACY = Reward("accuracy", accuracy)
FORMAT = Reward("format", well_formed, weight=0.1)
PROGRESS = Reward("progress", progress, process=True)


# --- tokens ----------------------------------------------------------------------------------------------------------


def text(task: Task, tokens: Tokens) -> str:
    """Tokens of any shape as a string, on the host."""
    return "".join(task.vocabulary[token] for token in np.ravel(tokens) if token != PAD)


def join(length: int, *parts: Tokens | int) -> Tokens:
    """The parts one after the other without their gaps, `PAD` behind: `[length]`."""
    tokens = jnp.concatenate([jnp.atleast_1d(jnp.asarray(part, jnp.int32)) for part in parts])
    tokens = tokens[jnp.argsort(tokens == PAD, stable=True)][:length]
    return jnp.pad(tokens, (0, length - tokens.shape[0]), constant_values=PAD)


def digits(number: jax.Array, width: int) -> Tokens:
    """A number from 0 to 10**width - 1 in decimal, `[width]`, `PAD` in place of leading zeros."""
    powers = 10 ** jnp.arange(width - 1, -1, -1)
    shown = (number >= powers) | (powers == 1)
    return jnp.where(shown, DIGITS + number // powers % 10, PAD)


def in_digits(problem: Problem, completion: Tokens) -> jax.Array:
    """Whether a completion is one digit or more, and then its end."""
    length = jnp.sum(completion != PAD)
    is_digit = (completion >= DIGITS) & (completion < DIGITS + 10)
    return (length > 1) & (completion[length - 1] == END) & (jnp.sum(is_digit) == length - 1)

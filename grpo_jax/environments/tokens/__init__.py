"""Token tasks, like those for language models: `Config(environment="tokens:sort-5")`."""

import functools

from grpo_jax.environments.tokens.environment import Completion, token_environment
from grpo_jax.environments.tokens.task import (
    ACCURACY,
    ASK,
    DIGITS,
    END,
    FORMAT,
    PAD,
    PROGRESS,
    VOCABULARY,
    Reward,
    Task,
    accuracy,
    digits,
    gated,
    in_digits,
    join,
    overlong_punishment,
    progress,
    text,
    well_formed,
)
from grpo_jax.environments.tokens.tasks import addition, calculator, sort
from grpo_jax.errors import ConfigError, nearest

TASKS = {"addition": addition, "calculator": calculator, "sort": sort}
"""Functions from a size to a task, by the name before the size. Others may be added."""


@functools.lru_cache
def make_task(name: str) -> Task:
    """The task with a name such as "sort-5", or "sort" for the default size.

    Raises:
      ConfigError: for an unknown name, or a size that is not a positive integer.
    """
    kind, dash, size = name.partition("-")
    if kind not in TASKS:
        raise ConfigError(f"unknown token task {kind!r}: {nearest(kind, TASKS)}")
    if dash and not (size.isdecimal() and int(size) > 0):
        raise ConfigError(f"tokens:{name}: {size!r} is not a size; write a positive integer, as in tokens:{kind}-5")
    return TASKS[kind](int(size)) if dash else TASKS[kind]()


__all__ = [
    "ACCURACY",
    "ASK",
    "DIGITS",
    "END",
    "FORMAT",
    "PAD",
    "PROGRESS",
    "TASKS",
    "VOCABULARY",
    "Completion",
    "Reward",
    "Task",
    "accuracy",
    "digits",
    "gated",
    "in_digits",
    "join",
    "make_task",
    "overlong_punishment",
    "progress",
    "text",
    "token_environment",
    "well_formed",
]

"""Token tasks, like those for language models: `Config(environment="tokens:sort-5")`."""

import functools

from grpo_jax.environments.tokens import task
from grpo_jax.environments.tokens.environment import Completion, token_environment
from grpo_jax.environments.tokens.task import *  # noqa: F403
from grpo_jax.environments.tokens.tasks import addition, calculator, sort
from grpo_jax.errors import ConfigError, nearest

__all__ = ["Completion", "TASKS", "make_task", "token_environment"]
__all__ += task.__all__

TASKS = {"addition": addition, "calculator": calculator, "sort": sort}
"""Functions from a size to a task, by the name before the size. Others may be added."""


@functools.lru_cache
def make_task(name: str) -> task.Task:
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

"""Trainings that a new process measures, of one size or with our settings; what suits each token task."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from grpo_jax import make_init, make_train_step, tuned
from grpo_jax.runs.imitation import warm_start

from . import reference_implementations as reference
from . import workloads


class TokenTask(NamedTuple):
    """The length of training and the warm start of a token task."""

    total_steps: int  # tokens that each seed may sample
    target: float  # sampled accuracy at which the warm start ends
    learning_rate: float = 5e-4  # of the warm start


TASKS = {
    "sort": TokenTask(total_steps=1_000_000, target=0.5),
    "addition": TokenTask(total_steps=2_500_000, target=0.7, learning_rate=3e-3),
    "calculator": TokenTask(total_steps=1_000_000, target=0.1, learning_rate=1e-3),
    "countdown": TokenTask(total_steps=2_500_000, target=0.4, learning_rate=3e-3),
}
"""By the name without the size."""
REWARD_HACKING = TokenTask(total_steps=200_000, target=0.02)
"""A warm start so short that most groups contain no right answer, so that a reward for the format dominates."""


def token_task(task: str) -> TokenTask:
    """For the name of a task, such as "sort-5"."""
    return TASKS.get(task.partition("-")[0], TokenTask(total_steps=4_000_000, target=0.5, learning_rate=1e-3))


class Training(NamedTuple):
    init: Callable  # (key) -> state
    step: Callable  # (state) -> (state, metrics)
    num_steps: int  # of each environment in an iteration
    num_samples: int  # of all environments in an iteration, at most


def same_work(name: str, environment: str, learning_rate: float) -> Training:
    """An implementation of PPO with 64 environments, 128 steps, 4 epochs of 4 minibatches."""
    size = reference.Size(num_envs=64, learning_rate=learning_rate)
    if name == "rejax PPO":
        implementation = reference.rejax_ppo(environment, size, logged=True)
    elif name == "plain PPO":
        implementation = reference.plain_ppo(environment, size)
    else:
        implementation = workloads.ours(workloads.make_config(environment, size, critic=True), learning_rate)
    return Training(*implementation, size.num_steps, size.num_samples)


def tuned_training(algorithm: str, environment: str, total_steps: float, seed: int) -> Training:
    """Ours with the settings of `grpo-jax train`.

    On a token task it begins with a warm start on solutions, as no answer of random weights is right.
    """
    keys, params = jax.random.key(seed)[None], None
    config, hyperparams = tuned(environment, algorithm, total_steps=total_steps)
    init, step = make_init(config), make_train_step(config)
    if config.env.task is not None:
        _, target, learning_rate = token_task(environment.partition(":")[2])
        started = warm_start(config, keys, target=target, learning_rate=learning_rate)
        params = jax.tree.map(lambda leaf: leaf[0], started.params)
    size = config.num_steps, config.steps_per_iteration
    return Training(lambda key: init(key, hyperparams, params=params), step, *size)

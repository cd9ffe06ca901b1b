"""GRPO as language models use it, on small tasks: `python -m experiments.tokens --task sort-5`."""

import dataclasses
from pathlib import Path

import jax
import tyro

from experiments.settings import WARM_STARTS, WARM_START
from experiments.study import Plan, Study, StudyArguments, command, make_plan
from experiments.token_runs import EXACT_MATCH, Watch, as_started, plot_accuracies, show_samples, warm_started
from grpo_jax.algorithms import PPO, Algorithm, by_name, with_reference
from grpo_jax.groups import FRESH

PPO_ON_TOKENS = PPO._replace(start=FRESH)


@dataclasses.dataclass
class Arguments(StudyArguments):
    """Warm start on solutions, then reinforcement on rewards, measured on prompts that neither has seen."""

    task: str = "sort-5"
    """Of grpo_jax.environments.tokens, such as addition-2 or countdown-3."""
    algorithm: str = "grpo"
    """Name of the algorithm."""
    num_seeds: int = 5
    """Independent runs, each from a warm start of its own."""
    total_steps: int | None = None
    """Tokens that a seed may sample; the task's own number if left out."""
    target: float | None = None
    """Sampled accuracy at which the warm start ends; the task's own if left out."""
    warm_start: Path | None = None
    """File of the warm start: read if it is there, written if not."""


def on_tokens(algorithm: Algorithm) -> Algorithm:
    """With the warm start as a frozen reference; PPO with rollouts that begin with the prompt."""
    if algorithm == PPO:
        algorithm = PPO_ON_TOKENS
    return with_reference(algorithm)


def token_plan(label: str, arguments: Arguments, algorithm: Algorithm, **changes) -> Plan:
    """A run on the task with its settings, some of them changed."""
    ...


def main(arguments: Arguments) -> None:
    plan = make_plan(f"tokens:{arguments.task}", arguments.algorithm, total_steps=arguments.total_steps)
    ...


if __name__ == "__main__":
    command(lambda: main(tyro.cli(Arguments)))

"""The names that flags take: `grpo-jax list algorithms`, of environments, networks, suites or hyperparameters."""

import dataclasses
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from typing import Annotated

import tyro
from docstring_parser import parse_from_object
from rich.console import Console
from rich.table import Table

from grpo_jax.algorithms import ALGORITHMS, PAPERS
from grpo_jax.commands.harness.command import command
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.environments.gymnax_names import names
from grpo_jax.environments.suites import SUITES
from grpo_jax.errors import ConfigError, nearest
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.policies.networks import NETWORKS

WORDS = {
    "grpo": "One-episode groups: the return relative to its group's, in standard deviations",
    "grpo_return_to_go": "Each step by its return-to-go relative to the group's at that step",
    "grpo_process": "Rewards within an episode, normalised in the group (process supervision)",
    "dr_grpo": "No division by the group's deviation or by the episode's length",
    "rloo": "The return minus the mean of the others in the group (leave-one-out)",
    "reinforce_plus_plus": "Returns-to-go, whitened over the batch; no groups",
    "reinforce_plus_plus_baseline": "Minus the group's mean, then whitened over the batch",
    "remax": "The return minus that of a greedy episode",
    "opo": "Minus the group's mean weighted by episode length",
    "pass_at_k": "The probability that one of k samples succeeds",
    "gpg": "The plain policy gradient, without a ratio or a clip",
    "dapo": "A higher upper clip, no KL, groups without signal left out",
    "gspo": "The ratio of the whole sequence",
    "gmpo": "The geometric mean of the steps' ratios",
    "cispo": "The clipped ratio as a weight, so that every step has a gradient",
    "sapo": "A smooth gate in place of the clip",
    "clip_cov": "No gradient at steps of high covariance, so that entropy stays",
    "kl_cov": "A KL penalty at steps of high covariance, so that entropy stays",
    "grpo_per_sequence": "As first published: each sequence counts the same, however long",
    "gdpo": "Each part of the reward normalised by itself, for token tasks",
    "gspo_token": "The sequence's ratio with the gradient of each step's",
    "luspo": "The sequence's ratio, and a sum over its steps",
    "lite_ppo": "Minus the group's mean, divided by the batch's deviation",
    "two_sided_clip": "A limit also for bad steps that have become likelier",
    "gigpo": "Compares episodes, and also members that stand in the same state",
    "max_rl": "The return relative to the group's, divided by the group's mean",
    "optimal_token_baseline": "A baseline of least variance at each step",
    "ipo": "Steps whose probability changed too much are left out; no clip",
    "dppo_tv": "A trust region by total variation in place of the clip",
    "dppo_kl": "A trust region by KL in place of the clip",
    "vespo": "A smooth weight of the sequence's ratio in place of the clip",
    "dro": "The policy gradient with a squared penalty on the log-ratio",
    "high_entropy": "Only the fifth of the steps with the highest entropy learns",
    "off_policy_mask": "Bad sequences that have moved far from the behaviour are left out",
    "ppo": "GAE and a critic; environments continue across rollouts",
    "kernel_gae": "GAE without a critic: values from similar states of other environments",
    "same_step_gae": "GAE on the group's mean return at the same step",
    "same_step_critic": "The same, with a critic where the window ends",
    "vine_ppo": "Values from rollouts that branch off every state",
    "state_hash": "The return minus the mean over visits of the same state",
}
"""What sets each algorithm apart."""


def algorithms() -> Iterator[tuple[str, ...]]:
    for name in ALGORITHMS:
        yield name, f"{WORDS.get(name, '')} ({PAPERS[name]})".strip()


def environments() -> Iterator[tuple[str, ...]]:
    for name in names():
        yield (name,)
    yield from ((f"{suite}:NAME",) for suite in sorted(SUITES))
    yield ("package.module:Name",)


def networks() -> Iterator[tuple[str, ...]]:
    yield "auto", "cnn for images, transformer where there is a prompt, else mlp"
    for name, network in NETWORKS.items():
        yield name, _first_sentence(inspect.getdoc(network))


def suites() -> Iterator[tuple[str, ...]]:
    packages = {"playground": "mujoco_playground", "xland": "xminigrid", "tokens": "grpo_jax"}
    for suite in sorted(SUITES):
        found = importlib.util.find_spec(packages.get(suite, suite)) is not None
        yield f"{suite}:NAME", "" if found else "not installed"


def hyperparameters() -> Iterator[tuple[str, ...]]:
    for field in parse_from_object(Hyperparams).params:
        yield field.arg_name, str(getattr(Hyperparams, field.arg_name)), _first_sentence(field.description)


def _first_sentence(text: str | None) -> str:
    return " ".join((text or "").split()).partition(". ")[0].rstrip(".")


LISTS = {each.__name__: each for each in (algorithms, environments, networks, suites, hyperparameters)}


@dataclasses.dataclass
class Arguments:
    """Prints the names that a flag takes, with a line each."""

    what: Annotated[str, tyro.conf.Positional] = ""
    """algorithms, environments, networks, suites or hyperparameters."""


def main(arguments: Arguments) -> None:
    if arguments.what not in LISTS:
        advice = nearest(arguments.what, LISTS) if arguments.what else f"write one of {', '.join(LISTS)}"
        raise ConfigError(f"no list {arguments.what!r}: {advice}")
    table, rows = Table.grid(padding=(0, 2)), list(LISTS[arguments.what]())
    for index in range(len(rows[0])):
        table.add_column(no_wrap=index == 0)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 80, markup=False, highlight=False).print(table)


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

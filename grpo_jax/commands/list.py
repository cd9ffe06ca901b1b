"""The names that flags take: `grpo-jax list algorithms`, of environments, networks or hyperparameters."""

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

from grpo_jax.algorithms import ALGORITHMS, PAPERS, SENTENCES
from grpo_jax.commands.harness.command import command
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.environments.registry import gymnax_names
from grpo_jax.environments.suites import SUITES
from grpo_jax.errors import ConfigError, nearest
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.objectives import EntropyHyperparams
from grpo_jax.policies.networks import NETWORKS
from grpo_jax.policies.sampling import SamplingHyperparams


def algorithms() -> Iterator[tuple[str, ...]]:
    for name in ALGORITHMS:
        yield name, f"{SENTENCES[name]} ({PAPERS[name]})"


def environments() -> Iterator[tuple[str, ...]]:
    for name in gymnax_names():
        yield name, ""
    packages = {"playground": "mujoco_playground", "xland": "xminigrid", "tokens": "grpo_jax"}
    for suite in sorted(SUITES):
        is_there = importlib.util.find_spec(packages.get(suite, suite)) is not None
        yield f"{suite}:NAME", "" if is_there else "not installed"
    yield "package.module:Name", ""


def networks() -> Iterator[tuple[str, ...]]:
    yield "auto", "as tuned (mlp for MinAtar); untuned: cnn for images, transformer where there is a prompt, else mlp"
    for name, network in NETWORKS.items():
        yield name, _first_sentence(inspect.getdoc(network))


def hyperparameters() -> Iterator[tuple[str, ...]]:
    of_algorithms = (algorithm.hyperparams for algorithm in ALGORITHMS.values())
    for kind in dict.fromkeys([Hyperparams, *of_algorithms, EntropyHyperparams, SamplingHyperparams]):
        for field in parse_from_object(kind).params:
            yield field.arg_name, str(getattr(kind, field.arg_name)), _first_sentence(field.description)


def _first_sentence(text: str | None) -> str:
    return " ".join((text or "").split()).partition(". ")[0].rstrip(".")


LISTS = {each.__name__: each for each in (algorithms, environments, networks, hyperparameters)}


@dataclasses.dataclass
class Arguments:
    """Prints the names that a flag takes, with a line each."""

    what: Annotated[str, tyro.conf.Positional] = ""
    """algorithms, environments, networks or hyperparameters; without it, these four."""


def main(arguments: Arguments) -> None:
    if arguments.what and arguments.what not in LISTS:
        raise ConfigError(f"no list {arguments.what!r}: {nearest(arguments.what, LISTS)}")
    commands = [(f"grpo-jax list {name}",) for name in LISTS]
    table, rows = Table.grid(padding=(0, 2)), list(LISTS[arguments.what]()) if arguments.what else commands
    for index in range(len(rows[0])):
        table.add_column(no_wrap=index == 0)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 80, markup=False, highlight=False).print(table)


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

"""Any algorithm on any environment: `python -m experiments.train --environment CartPole-v1 --algorithm grpo`."""

import dataclasses
import sys
from pathlib import Path
from typing import Any, get_type_hints

import jax
import tyro

from experiments.settings import settings
from experiments.study import Plan, Study, StudyArguments, command
from grpo_jax import Config, Hyperparams
from grpo_jax.algorithms import Algorithm, by_name, name_of
from grpo_jax.environments.render import check_renderable, render
from grpo_jax.evaluation import record_episode


@dataclasses.dataclass(kw_only=True)
class Arguments(StudyArguments):
    """Trains one algorithm on one environment, all seeds in one program."""

    config: tyro.conf.OmitArgPrefixes[Config]
    hyperparams: tyro.conf.OmitArgPrefixes[Hyperparams]
    num_seeds: int = 1
    """Independent runs."""
    render: Path | None = None
    """Draws an episode of the first seed's trained policy into this file, such as out.gif."""


# On a command line, an environment and an algorithm are names, and overrides are written name=value.
ON_THE_COMMAND_LINE = tyro.constructors.ConstructorRegistry()


@ON_THE_COMMAND_LINE.primitive_rule
def _by_name(type_info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
    if type_info.type not in (str | Algorithm, str | Any):
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="NAME",
        instance_from_str=lambda strings: strings[0],
        is_instance=lambda value: True,
        str_from_instance=lambda value: [str(value)],
    )


@ON_THE_COMMAND_LINE.primitive_rule
def _overrides(type_info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
    if type_info.type != get_type_hints(Config)["env_params"]:
        return None

    def parse(strings: list[str]) -> dict[str, float]:
        for string in strings:
            if "=" not in string:
                raise ValueError(f"{string!r} is not of the form NAME=VALUE")
        pairs = [string.partition("=") for string in strings]
        return {name: float(value) for name, _, value in pairs}

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="[NAME=VALUE ...]",
        instance_from_str=parse,
        is_instance=lambda value: True,
        str_from_instance=lambda value: [f"{name}={number}" for name, number in dict(value).items()],
    )


def with_settings(flags: list[str]) -> list[str]:
    """The flags, and before them those of the algorithm's tuned settings: of two, the later one holds."""

    def value_of(flag: str, default: str) -> str:
        words = [word for argument in flags for word in argument.split("=", 1)]
        return next((words[i + 1] for i in reversed(range(len(words) - 1)) if words[i] == flag), default)

    algorithm = name_of(by_name(value_of("--algorithm", Config.algorithm)))
    tuned = settings(value_of("--environment", Config.environment), algorithm)
    return [word for field, value in tuned.items() for word in as_flag(field, value)] + flags


def as_flag(field: str, value: Any) -> list[str]:
    """A field as tyro takes it."""
    flag = field.replace("_", "-")
    match value:
        case bool():
            return [f"--{flag}" if value else f"--no-{flag}"]
        case dict():
            return [f"--{flag}", *(f"{name}={number}" for name, number in value.items())]
    return [f"--{flag}", str(value)]


def main(arguments: Arguments) -> None:
    if arguments.render is not None:
        check_renderable(arguments.config.env.name)
    config = arguments.config
    plan = Plan(name_of(config.algorithm), config, arguments.hyperparams)
    study = Study("train", [plan], arguments)
    (states,) = study.run_all()
    study.finish()
    if arguments.render is not None:
        first = jax.tree.map(lambda leaf: leaf[0], states)
        episode = record_episode(config, first, jax.random.key(arguments.seed))
        render(config.environment, dict(config.env_params), episode.states, episode.rewards, arguments.render)
        study.console.print(f"An episode of the first seed is drawn in {arguments.render}", highlight=False)


if __name__ == "__main__":
    command(lambda: main(tyro.cli(Arguments, args=with_settings(sys.argv[1:]), registry=ON_THE_COMMAND_LINE)))

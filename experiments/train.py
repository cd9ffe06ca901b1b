"""Any algorithm on any environment: `python -m experiments.train --environment CartPole-v1 --algorithm grpo`."""

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import jax
import tyro

from experiments.settings import settings
from experiments.study import Plan, Study, StudyArguments, command
from grpo_jax import Config, Hyperparams
from grpo_jax.algorithms import Algorithm, by_name, name_of
from grpo_jax.environments.render import check_renderable, render
from grpo_jax.errors import ConfigError, nearest
from grpo_jax.evaluation import record_episode

FIELDS = (*Config.__dataclass_fields__, *Hyperparams.__dataclass_fields__)


@dataclasses.dataclass(kw_only=True)
class Settings:
    """What a run is."""

    config: tyro.conf.OmitArgPrefixes[Config]
    hyperparams: tyro.conf.OmitArgPrefixes[Hyperparams]
    config_file: Annotated[Path | None, tyro.conf.arg(name="config")] = None
    """JSON object of fields, as a sweep writes its best, in place of the tuned settings; flags override them."""


@dataclasses.dataclass(kw_only=True)
class Arguments(StudyArguments, Settings):
    """Trains one algorithm on one environment, all seeds in one program."""

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
        return dict(_override(string) for string in strings)

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="[NAME=VALUE ...]",
        instance_from_str=parse,
        is_instance=lambda value: True,
        str_from_instance=lambda value: [f"{name}={number}" for name, number in dict(value).items()],
    )


def _override(string: str) -> tuple[str, float]:
    name, equals, value = string.partition("=")
    try:
        return name, float(value)
    except ValueError:
        problem = f"{value!r} is not a number" if equals else "there is no '='"
        raise ValueError(f"{string!r}: {problem}; write NAME=NUMBER, such as max_steps_in_episode=200") from None


def parse(arguments: type, flags: list[str]) -> Any:
    """The arguments, a class with the fields of `Settings`, as the command line has them."""
    return tyro.cli(arguments, args=with_settings(flags), registry=ON_THE_COMMAND_LINE)


def with_settings(flags: list[str]) -> list[str]:
    """The flags, and before them those of --config, or else the tuned settings: of two, the later one holds.

    Parameters of the environment are merged one by one.
    """

    def value_of(flag: str, default: str | None) -> str | None:
        words = [word for argument in flags for word in argument.split("=", 1)]
        return next((words[i + 1] for i in reversed(range(len(words) - 1)) if words[i] == flag), default)

    path = value_of("--config", None)
    if path is not None:
        fields = read_fields(Path(path))
    else:
        algorithm = name_of(by_name(value_of("--algorithm", Config.algorithm)))
        fields = settings(value_of("--environment", Config.environment), algorithm)
    if "--env-params" in flags:
        after = flags.index("--env-params") + 1
        flags = flags[:after] + as_flag("env_params", fields.pop("env_params", {}))[1:] + flags[after:]
    return [word for field, value in fields.items() for word in as_flag(field, value)] + flags


def read_fields(path: Path) -> dict[str, Any]:
    """The fields of `Config` and `Hyperparams` in a JSON file.

    Raises:
      ConfigError: there is no such file, it holds no JSON object, or a name in it is that of no field.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}; use a file such as a sweep's best.json") from error
    if not isinstance(fields, dict):
        raise ConfigError(f'{path} holds no JSON object; use one such as {{"environment": "CartPole-v1"}}')
    for name in fields:
        if name not in FIELDS:
            raise ConfigError(f"{path}: {name!r} is no field of Config or Hyperparams: {nearest(name, FIELDS)}")
    return fields


def as_fields(config: Config, hyperparams: Hyperparams) -> dict[str, Any]:
    """What `read_fields` gives back, without what is None, a default; infinities, which JSON lacks, are "inf"."""
    fields = {field: getattr(config, field) for field in Config.__dataclass_fields__}
    fields |= {field: getattr(hyperparams, field) for field in Hyperparams.__dataclass_fields__}
    fields |= {"algorithm": name_of(config.algorithm), "env_params": dict(config.env_params)}
    fields = {field: "inf" if value == math.inf else value for field, value in fields.items()}
    return {field: value for field, value in fields.items() if value is not None}


def flag_of(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def as_flag(field: str, value: Any) -> list[str]:
    """A field as tyro takes it."""
    flag = flag_of(field)
    match value:
        case bool() if get_type_hints(Config).get(field) is bool:
            return [flag if value else flag_of(f"no_{field}")]
        case list() | tuple():
            return [flag, *map(str, value)]
        case dict():
            return [flag, *(f"{name}={number}" for name, number in value.items())]
    return [flag, str(value)]


def main(arguments: Arguments) -> None:
    if arguments.render is not None:
        check_renderable(arguments.config.env.name)
        if jax.process_count() > 1:
            raise ConfigError("--render draws what one process has; leave it out, and draw a run of a single process")
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
    command(lambda: main(parse(Arguments, sys.argv[1:])))

"""The flags of a command line as a run's `Config` and `Hyperparams`, and files of such fields."""

import dataclasses
import json
import math
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import tyro

from experiments.harness.settings import settings
from grpo_jax import Config, Hyperparams
from grpo_jax.algorithms import Algorithm, by_name, name_of
from grpo_jax.errors import ConfigError, nearest

FIELDS = get_type_hints(Config) | get_type_hints(Hyperparams)
"""The types of all fields."""


JSON_TYPES = {bool: (bool,), int: (int,), float: (int, float), str: (str,), tuple: (list,), Mapping: (dict,)}
"""What is read of a JSON file for a field of a type."""


@dataclasses.dataclass(kw_only=True)
class Settings:
    """What a run is."""

    config: tyro.conf.OmitArgPrefixes[Config]
    hyperparams: tyro.conf.OmitArgPrefixes[Hyperparams]
    config_file: Annotated[Path | None, tyro.conf.arg(name="config")] = None
    """JSON object of fields, as a sweep writes its best, in place of the tuned settings; flags override them."""


@dataclasses.dataclass
class Chosen:
    """The flags that tell which settings are the defaults of all others."""

    config: Path | None = None
    environment: str = Config.environment
    algorithm: str = Config.algorithm


def parse(arguments: type, flags: Sequence[str]) -> Any:
    """The arguments, a class with the fields of `Settings`, as the command line has them.

    Their defaults are the fields in the file --config, or else the tuned settings of the environment and the
    algorithm; parameters of the environment are merged one by one.
    """
    chosen, _ = tyro.cli(Chosen, args=flags, return_unknown_args=True, add_help=False)
    if chosen.config is not None:
        fields = read_fields(chosen.config)
    else:
        fields = settings(chosen.environment, name_of(by_name(chosen.algorithm)))
    of_hyperparams = {name: fields[name] for name in fields if name in Hyperparams.__dataclass_fields__}
    # Not by its constructor, which would check it and choose its sizes before the flags had a say.
    config = object.__new__(Config)
    vars(config).update({name: fields[name] for name in fields if name not in of_hyperparams})
    return tyro.cli(
        arguments,
        args=flags,
        default=arguments(config=config, hyperparams=Hyperparams(**of_hyperparams)),
        registry=_words(dict(fields.get("env_params", ()))),
    )


def _words(env_params: Mapping[str, float]) -> tyro.constructors.ConstructorRegistry:
    """An environment and an algorithm are names, and overrides, in addition to these, are written name=value."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def by_name(type_info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
        if type_info.type not in (str | Algorithm, str | Any):
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="NAME",
            instance_from_str=lambda strings: strings[0],
            is_instance=lambda value: True,
            str_from_instance=lambda value: [str(value)],
        )

    @registry.primitive_rule
    def overrides(type_info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
        if type_info.type != FIELDS["env_params"]:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs="*",
            metavar="[NAME=VALUE ...]",
            instance_from_str=lambda strings: {**env_params, **dict(map(_override, strings))},
            is_instance=lambda value: True,
            str_from_instance=lambda value: [f"{name}={number}" for name, number in dict(value).items()],
        )

    return registry


def _override(string: str) -> tuple[str, float]:
    name, equals, value = string.partition("=")
    try:
        return name, float(value)
    except ValueError:
        problem = f"{value!r} is not a number" if equals else "there is no '='"
        raise ValueError(f"{string!r}: {problem}; write NAME=NUMBER, such as max_steps_in_episode=200") from None


def read_fields(path: Path) -> dict[str, Any]:
    """The fields of `Config` and `Hyperparams` in a JSON file.

    Raises:
      ConfigError: there is no such file, it holds no JSON object, or what it holds is no field or no value of one.
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
    return {name: _of_json(path, name, value) for name, value in fields.items()}


def _of_json(path: Path, name: str, value: Any) -> Any:
    """A value as the field has it; what `Config` and `Hyperparams.check` make sure of is left to them."""
    kinds = get_args(FIELDS[name]) if isinstance(FIELDS[name], types.UnionType) else (FIELDS[name],)
    expected = get_origin(kinds[0]) or kinds[0]  # of several, JSON has the first one
    if value is None and types.NoneType in kinds:
        return None
    if expected is float and value == "inf":
        return math.inf
    if type(value) not in JSON_TYPES[expected]:
        raise ConfigError(f"{path}: {name}={json.dumps(value)} must be of type {expected.__name__}; or leave it out")
    return expected(value) if expected in (float, tuple) else value


def as_fields(config: Config, hyperparams: Hyperparams) -> dict[str, Any]:
    """What `read_fields` gives back, without what is None, a default; infinities, which JSON lacks, are "inf"."""
    fields = {field: getattr(config, field) for field in Config.__dataclass_fields__}
    fields |= {field: getattr(hyperparams, field) for field in Hyperparams.__dataclass_fields__}
    fields |= {"algorithm": name_of(config.algorithm), "env_params": dict(config.env_params)}
    fields = {field: "inf" if value == math.inf else value for field, value in fields.items()}
    return {field: value for field, value in fields.items() if value is not None}

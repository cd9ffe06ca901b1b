"""A run's `Config` and `Hyperparams` from the flags of a command line, and from JSON files."""

import dataclasses
import json
import math
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import tyro

from experiments.harness.settings import settings, split_fields
from grpo_jax import Config, Hyperparams
from grpo_jax.algorithms import Algorithm, by_name, name_of
from grpo_jax.devices.execution_plan import ExecutionPlan
from grpo_jax.errors import ConfigError, nearest
from grpo_jax.policies import Architecture

FIELDS = get_type_hints(Config) | get_type_hints(Hyperparams)
"""The types of all fields."""

JSON_TYPES = {bool: (bool,), int: (int,), float: (int, float), str: (str,), tuple: (list,), Mapping: (dict,)}
"""The types that JSON has for each type of a field."""


@dataclasses.dataclass(kw_only=True)
class Settings:
    """The flags that describe a run."""

    config: tyro.conf.OmitArgPrefixes[Config]
    hyperparams: tyro.conf.OmitArgPrefixes[Hyperparams]
    config_file: Annotated[Path | None, tyro.conf.arg(name="config")] = None
    """JSON file of fields, such as a sweep's best.json, in place of the tuned settings; flags override them."""


@dataclasses.dataclass
class Chosen:
    """The flags on which the defaults of all others depend."""

    config: Path | None = None
    environment: str = Config.environment
    algorithm: str = Config.algorithm


def parse(arguments: type, flags: Sequence[str]) -> Any:
    """Parses the flags of a class with the fields of `Settings`.

    The defaults are the fields in the file --config, or else the tuned settings of the environment and the algorithm.
    Parameters of the environment are merged one by one.
    """
    chosen, _ = tyro.cli(Chosen, args=flags, return_unknown_args=True, add_help=False)
    if chosen.config is not None:
        fields = read_fields(chosen.config)
    else:
        fields = settings(chosen.environment, name_of(by_name(chosen.algorithm)))
    static, traced = split_fields(fields)
    # Not by its constructor, which would check it and choose its sizes before the flags are read.
    config = object.__new__(Config)
    vars(config).update(static)
    return tyro.cli(
        arguments,
        args=flags,
        default=arguments(config=config, hyperparams=Hyperparams(**traced)),
        registry=_constructors(dict(fields.get("env_params", ()))),
    )


def _constructors(env_params: Mapping[str, float]) -> tyro.constructors.ConstructorRegistry:
    """Environments and algorithms are given by name; parameters of the environment as name=value, added to these."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def by_name(type_info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
        if type_info.type not in (str | Algorithm, str | ExecutionPlan, str | Any):
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
      ConfigError: the file cannot be read, is no JSON object, or has an unknown field or a value of the wrong type.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}; use a file such as a sweep's best.json") from error
    if not isinstance(fields, dict):
        raise ConfigError(f'{path} holds no JSON object; use one such as {{"environment": "CartPole-v1"}}')
    return _from_json(path, fields, FIELDS, "Config or Hyperparams")


def _from_json(path: Path, fields: Mapping[str, Any], kinds: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The fields in their types; `Config` and `Hyperparams.check` check the rest."""
    for name in fields:
        if name not in kinds:
            raise ConfigError(f"{path}: {name!r} is no field of {what}: {nearest(name, kinds)}")
    return {name: _value_from_json(path, name, value, kinds[name]) for name, value in fields.items()}


def _value_from_json(path: Path, name: str, value: Any, kind: Any) -> Any:
    kinds = get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    expected = get_origin(kinds[0]) or kinds[0]  # of several types, JSON has the first one
    if value is None and types.NoneType in kinds:
        return None
    if expected is float and value == "inf":
        return math.inf
    if expected is Architecture and type(value) is dict:
        return Architecture(**_from_json(path, value, get_type_hints(Architecture), "Architecture"))
    if type(value) not in JSON_TYPES.get(expected, ()):
        raise ConfigError(f"{path}: {name}={json.dumps(value)} must be of type {expected.__name__}; or leave it out")
    return expected(value) if expected in (float, tuple) else value


def as_fields(config: Config, hyperparams: Hyperparams) -> dict[str, Any]:
    """The fields for `read_fields` in JSON's types: without None, a default, and with "inf" for infinity."""
    fields = {field: getattr(config, field) for field in Config.__dataclass_fields__}
    fields |= {field: getattr(hyperparams, field) for field in Hyperparams.__dataclass_fields__}
    fields |= {"algorithm": name_of(config.algorithm), "env_params": dict(config.env_params)}
    fields |= {"transformer": dataclasses.asdict(config.transformer)}
    fields = {field: "inf" if value == math.inf else value for field, value in fields.items()}
    return {field: value for field, value in fields.items() if value is not None}

"""The fields of `Config` and `Hyperparams` in JSON."""

import dataclasses
import json
import math
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from grpo_jax.algorithms import name_of
from grpo_jax.config.config import Config
from grpo_jax.errors import ConfigError, nearest
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.policies import Architecture

FIELDS = get_type_hints(Config) | get_type_hints(Hyperparams)
"""The types of all fields."""

JSON_TYPES = {bool: (bool,), int: (int,), float: (int, float), str: (str,), tuple: (list,), Mapping: (dict,)}
"""The types that JSON has for each type of a field."""


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

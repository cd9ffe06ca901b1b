"""The fields of `Config` and `Hyperparams` in JSON: names and numbers, and import paths of what is the user's own.

A folder may come from anyone, so nothing that it names is imported: SECURITY.md.
"""

import json
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from grpo_jax.algorithms import ALGORITHMS, GRPO, Algorithm, by_name, name_of
from grpo_jax.config import Config
from grpo_jax.environments.suites import SUITES
from grpo_jax.errors import ConfigError, nearest
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.importing import import_object, import_path
from grpo_jax.policies.networks import NETWORKS
from grpo_jax.policies.networks import name_of as network_name
from grpo_jax.recording.files import INFINITIES, as_numbers, describe_kind, fits, plain

FIELDS = get_type_hints(Config)
"""The types of the fields of `Config`."""

_FORMULAS = "grpo_jax.objectives.", "grpo_jax.baselines."


def from_json(
    path: Path | str,
    fields: Mapping[str, Any],
    kinds: Mapping[str, Any],
    what: str,
    *,
    trust: bool = False,
) -> dict[str, Any]:
    """The fields in their types; `Config` and `Hyperparams.check` check the rest.

    Args:
      path: the file that they come from, for errors.
      fields: values in JSON's types, as `config_fields` gives them.
      kinds: the type of each known field.
      what: the classes with these fields, for errors.
      trust: import what the file names; otherwise an import path is refused.

    Raises:
      ConfigError: for an unknown field, a value of the wrong type, or an import path that is refused.
    """
    found = {}
    for name, value in fields.items():
        try:
            if name not in kinds:
                raise ConfigError(f"{name!r} is no field of {what}: {nearest(name, kinds)}")
            found[name] = _value_from_json(name, value, kinds[name], trust)
        except ConfigError as error:
            where = path if str(error).startswith((name, repr(name))) else f"{path}: {name}"
            raise type(error)(f"{where}: {error}") from error
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: {name} is not as it was written ({error!r}); correct it") from error
    return found


def _value_from_json(name: str, value: Any, kind: Any, trust: bool) -> Any:
    kinds = get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    expected = get_origin(kinds[0]) or kinds[0]  # for a union, the first type is the JSON type
    if value is None and types.NoneType in kinds:
        return None
    if expected is float and value in INFINITIES:
        return float(value)
    if type(value) is dict:
        match name:
            case "network":
                network = NETWORKS[value["name"]]
                sizes = {field: part for field, part in value.items() if field != "name"}
                return network(**from_json(name, sizes, get_type_hints(network), network.__name__))
            case "algorithm":
                slots = {slot: _slot_from_json(slot, part, trust) for slot, part in value.items() if slot != "name"}
                return by_name(value["name"])._replace(**slots)
            case "env_params":
                return {parameter: as_numbers(each) for parameter, each in value.items()}
    if not fits(value, kinds[0]):
        raise ConfigError(f"{name}={json.dumps(value)[:80]} must be {describe_kind(kinds[0])}; or leave it out")
    if len(kinds) > 1 and expected is str and not trust:
        check_trusted(value, name)  # the config itself imports it
    return expected(value) if expected in (float, tuple) else value


def _slot_from_json(slot: str, value: Any, trust: bool) -> Any:
    if isinstance(value, list):
        return tuple(_slot_from_json(slot, part, trust) for part in value)
    if isinstance(value, dict):
        return getattr(by_name(value["of"]), slot)
    if not isinstance(value, str):
        return value
    known = formulas().get(value)
    if known is None and not trust:
        check_trusted(f":{value}", "algorithm")
    return import_object(value, "algorithm") if known is None else known


def as_fields(config: Config, hyperparams: Hyperparams) -> dict[str, Any]:
    """The fields for `--config` in JSON's types: without None, a default, and with "inf" for infinity."""
    own = {name: getattr(hyperparams, name) for name in config.hyperparams_class.__dataclass_fields__}
    fields = config_fields(config)[0] | own
    return plain({field: value for field, value in fields.items() if value is not None})


def config_fields(config: Config) -> tuple[dict[str, Any], list[str]]:
    """The fields of a config in JSON's types, without None, and the names of the fields that JSON cannot express.

    A network is an object with its name and sizes; an algorithm a name, or the slots that differ from GRPO's. Functions
    of the user are import paths; a function without one, such as a lambda, and an object of the user cannot be
    expressed.
    """
    found, missing = {}, []
    for field in Config.__dataclass_fields__:
        try:
            found[field] = _as_json(getattr(config, field))
        except TypeError:
            missing.append(field)
    found["env_params"] = plain(dict(config.env_params))
    return {field: value for field, value in found.items() if value is not None}, missing


def _as_json(value: Any) -> Any:
    """The value of a field in JSON's types; TypeError if it has no such form."""
    if isinstance(value, Algorithm):
        if value in ALGORITHMS.values():
            return name_of(value)
        slots = {slot: part for slot, part in value._asdict().items() if part != getattr(GRPO, slot)}
        return {"name": "grpo"} | {slot: _slot_as_json(slot, part) for slot, part in slots.items()}
    if type(value) in NETWORKS.values():
        return plain({"name": network_name(value), **vars(value)})
    if value is None or isinstance(value, bool | int | float | str) or type(value) is tuple:
        return plain(value)
    if (path := import_path(value)) is None:
        raise TypeError(f"{value!r} has no import path")
    return path


def _slot_as_json(slot: str, value: Any) -> Any:
    """A slot: a number, an import path, a list of those, or {"of": "dapo"}, as that algorithm has it."""
    if value is None or isinstance(value, bool | int | float):
        return value
    for name, known in ALGORITHMS.items():
        if value == getattr(known, slot):
            return {"of": name}
    return [_slot_as_json(slot, part) for part in value] if type(value) is tuple else _as_json(value)


def formulas() -> dict[str, Any]:
    """The functions of `grpo_jax.objectives` and `grpo_jax.baselines` by import path: they compute with arrays."""
    modules = [module for name, module in sys.modules.items() if name.startswith(_FORMULAS)]
    return {
        f"{module.__name__}:{name}": each
        for module in modules
        for name, each in vars(module).items()
        if callable(each) and getattr(each, "__module__", "") == module.__name__
    }


class NotTrustedError(ConfigError):
    """A folder names code that nobody said to trust."""


def check_trusted(value: str, field: str) -> None:
    """Raises NotTrustedError for an import path, as opposed to a name, such as of a suite's environment."""
    suite, _, name = value.partition(":")
    if ":" in value and not (field == "environment" and suite in SUITES and ":" not in name):
        raise NotTrustedError(
            f"{field} is {value.removeprefix(':')!r}: loading would import and run that code. Pass the run's config, "
            "load(folder, config=...); or, if the folder is yours or you trust who made it, trust=True (--trust)"
        )

"""The fields of `Config` and `Hyperparams` in JSON, and what a folder may name there.

A folder may come from anyone, so nothing that it names is imported: SECURITY.md.
"""

import contextlib
import dataclasses
import functools
import json
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from grpo_jax.algorithms import Algorithm, name_of
from grpo_jax.config import Config
from grpo_jax.devices.execution_plan import ExecutionPlan
from grpo_jax.environments.suites import SUITES
from grpo_jax.errors import ConfigError, nearest
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.importing import import_object, import_path
from grpo_jax.policies.networks import NETWORKS
from grpo_jax.policies.networks import name_of as network_name
from grpo_jax.recording.files import INFINITIES, as_numbers, describe_kind, fits, plain, read_object
from grpo_jax.recording.identity import fields_of
from grpo_jax.updates.optimizers import OPTIMIZERS

FIELDS = get_type_hints(Config) | get_type_hints(Hyperparams)
"""The types of all fields."""

_SLOTS = "grpo_jax.objectives.", "grpo_jax.baselines.", "grpo_jax.groups"
# Of jax.numpy these alone: others read and write files.
_ARITHMETIC = (
    *("abs", "add", "clip", "cos", "cosh", "divide", "exp", "exp2", "expm1", "log", "log1p", "log2", "maximum"),
    *("minimum", "multiply", "negative", "ones_like", "power", "reciprocal", "sign", "sin", "sinh", "sqrt"),
    *("square", "subtract", "tan", "tanh", "zeros_like"),
)


def read_fields(path: Path, hyperparams: type[Hyperparams] = Hyperparams) -> dict[str, Any]:
    """The fields of `Config` and of the hyperparameters in a JSON file; ConfigError if it cannot be read."""
    try:
        fields = read_object(path)
    except ConfigError as error:
        raise ConfigError(f"--config {error}; use a file such as a sweep's best.json") from error
    kinds = FIELDS | get_type_hints(hyperparams)
    return from_json(path, fields, kinds, f"Config or {hyperparams.__name__}", trust=True)


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
      trust: import what the file names; otherwise it may only name what `find_trusted` finds.

    Raises:
      ConfigError: for an unknown field, a value of the wrong type, a damaged object, or an import path that is refused.
    """
    for name in fields:
        if name not in kinds:
            raise ConfigError(f"{path}: {name!r} is no field of {what}: {nearest(name, kinds)}")
    return {name: _value_from_json(path, name, value, kinds[name], trust) for name, value in fields.items()}


def _value_from_json(path: Path | str, name: str, value: Any, kind: Any, trust: bool) -> Any:
    kinds = get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    expected = get_origin(kinds[0]) or kinds[0]  # of several types, JSON has the first one
    if value is None and types.NoneType in kinds:
        return None
    if expected is float and value in INFINITIES:
        return float(value)
    if name == "network" and type(value) is dict and "name" in value:
        with _errors_of(path, name):
            network = NETWORKS[value["name"]]
            sizes = {field: part for field, part in value.items() if field != "name"}
            return network(**from_json(name, sizes, get_type_hints(network), network.__name__))
    if len(kinds) > 1 and expected is str and type(value) in (dict, str):
        with _errors_of(path, name):
            if type(value) is dict:
                return _object_from_json(value, name, trust)
            if ":" in value and not trust:
                find_trusted(value, name)  # the config itself imports it
            return value
    if name == "env_params" and type(value) is dict:
        return {parameter: as_numbers(each) for parameter, each in value.items()}
    if not fits(value, kinds[0]):
        raise ConfigError(f"{path}: {name}={json.dumps(value)[:80]} must be {describe_kind(kinds[0])}; or leave it out")
    return expected(value) if expected in (float, tuple) else value


@contextlib.contextmanager
def _errors_of(path: Path | str, name: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        where = path if str(error).startswith(name) else f"{path}: {name}"
        raise ConfigError(f"{where}: {error}") from error
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {name} is not as it was written ({error!r}); correct it") from error


def as_fields(config: Config, hyperparams: Hyperparams) -> dict[str, Any]:
    """The fields for `read_fields` in JSON's types: without None, a default, and with "inf" for infinity."""
    fields = config_fields(config)[0] | vars(hyperparams)
    return plain({field: value for field, value in fields.items() if value is not None})


def config_fields(config: Config) -> tuple[dict[str, Any], list[str]]:
    """The fields of a config in JSON's types, without None, and the names of the fields that JSON cannot express.

    An algorithm is a name, or an object with its slots; a network an object with its name and fields. Other functions
    are import paths, a `functools.partial` of one with its arguments. A function without a path, such as a lambda, and
    an environment that is an object cannot be expressed.
    """
    known = name_of(config.algorithm)
    fields = {field: getattr(config, field) for field in Config.__dataclass_fields__}
    fields |= {"algorithm": config.algorithm if known == "custom" else known}
    fields |= {"env_params": dict(config.env_params)}
    if type(config.network) in NETWORKS.values():
        fields["network"] = {"name": network_name(config.network), **vars(config.network)}
    found, missing = {}, []
    for field, value in fields.items():
        try:
            found[field] = value if isinstance(value, dict) else _as_json(value)
            if callable(value) and import_path(value):
                found[field] = import_path(value)
        except TypeError:
            missing.append(field)
    return {field: value for field, value in found.items() if value is not None}, missing


def _as_json(value: Any) -> Any:
    """A value in JSON's types: functions as import paths, other values as objects; TypeError if it has no such form."""
    if value is None or (isinstance(value, bool | int | float | str) and value not in INFINITIES and value == value):
        return plain(value)
    if (parts := fields_of(value)) is not None and (path := import_path(type(value))) is not None:
        return {"class": path, "fields": {name: _as_json(part) for name, part in parts.items()}}
    if isinstance(value, tuple):
        return [_as_json(part) for part in value]
    if isinstance(value, functools.partial):
        options = {name: _as_json(part) for name, part in value.keywords.items()}
        return {"partial": _as_json(value.func), "arguments": _as_json(value.args), "options": options}
    if callable(value) and (path := import_path(value)) is not None:
        return {"import": path}
    raise TypeError(f"{value!r} has no import path")


def _object_from_json(value: Any, field: str, trust: bool) -> Any:
    """The value that `_as_json` wrote; ConfigError if the code has changed: no such name, or other fields."""
    if isinstance(value, list):
        return tuple(_object_from_json(part, field, trust) for part in value)
    if not isinstance(value, dict):
        return as_numbers(value)
    if "partial" in value:
        options = {name: _object_from_json(part, field, trust) for name, part in value["options"].items()}
        arguments = _object_from_json(value["arguments"], field, trust)
        return functools.partial(_object_from_json(value["partial"], field, trust), *arguments, **options)
    found = (import_object if trust else find_trusted)(value.get("class") or value["import"], field)
    if "class" not in value:
        return found
    if not (isinstance(found, type) and (dataclasses.is_dataclass(found) or hasattr(found, "_fields"))):
        raise ConfigError(f"{field}: {value['class']!r} is neither a dataclass nor a named tuple")
    try:
        return found(**{name: _object_from_json(part, field, trust) for name, part in value["fields"].items()})
    except TypeError as error:
        raise ConfigError(f"{field}: {value['class']!r} has other fields now ({error})") from error


@functools.cache
def trusted_objects() -> dict[str, Any]:
    """Functions and classes by import path: they compute with arrays, and call nothing but what they are given.

    Of this package those that fill slots, the optimisers, and the classes of a config's values; of JAX arithmetic and
    jax.nn; layers of flax.linen; and the public names of optax. None reads, writes, imports, or makes an environment.
    """
    found: dict[str, Any] = {}
    for module in [module for name, module in sys.modules.items() if name.startswith(_SLOTS)]:
        own = {name: each for name, each in vars(module).items() if getattr(each, "__module__", "") == module.__name__}
        found |= {f"{module.__name__}:{name}": each for name, each in own.items() if callable(each)}
    for each in (Algorithm, ExecutionPlan, Hyperparams, *OPTIMIZERS.values()):
        found[import_path(each)] = each
    for package, names in ((jnp, _ARITHMETIC), (jax.nn, dir(jax.nn)), (nn, dir(nn)), (optax, dir(optax))):
        for name in names:
            each = getattr(package, name)
            is_own = str(getattr(each, "__module__", "")).startswith(package.__name__.partition(".")[0])
            is_layer = isinstance(each, type) and issubclass(each, nn.Module)
            if name.startswith("_") or not callable(each) or not is_own or (package is nn and not is_layer):
                continue
            # The second is how `import_path` writes it, often with a private module.
            found |= {path: each for path in (f"{package.__name__}:{name}", import_path(each)) if path is not None}
    return found


def find_trusted(path: str, field: str) -> Any:
    """The object at an import path, which is not imported but looked up.

    Raises:
      ConfigError: it is none of `trusted_objects`, or a suite's environment by the name of a module.
    """
    suite, _, name = path.partition(":")
    if field == "environment" and suite in SUITES and ":" not in name:
        return path
    if path not in trusted_objects():
        raise ConfigError(
            f"{field} is {path!r}: loading would import and run that code, and it is none of what a folder may name "
            "(SECURITY.md). If you trust who made the folder, write trust=True (--trust); or pass the run's config, "
            "load(folder, config=...)"
        )
    return trusted_objects()[path]

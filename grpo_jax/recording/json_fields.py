"""Host: values in JSON's types, and what is read back of them: the types of fields, and a checksum over all."""

import dataclasses
import json
import types
import zlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import numpy as np

from grpo_jax.errors import ConfigError, nearest

CHECKSUM = "checksum"

NOT_FINITE = ("inf", "-inf", "nan")
"""What stands in JSON for the floats that it lacks, where they are read back."""

_WORDS = {
    **{int: "a whole number", float: "a number", str: "a text", bool: "true or false", types.NoneType: "null"},
    **{list: "a list", tuple: "a list", dict: "an object", Mapping: "an object"},
}


def plain(value: Any, *, not_finite: Callable[[float], str | None] = lambda number: None) -> Any:
    """`value` in JSON's own types: arrays become lists, dataclasses objects, paths texts.

    Args:
      value: any.
      not_finite: what stands for NaN and infinities: null, or with `str` one of `NOT_FINITE`.
    """
    if isinstance(value, Mapping):
        return {key: plain(item, not_finite=not_finite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, not_finite=not_finite) for item in value]
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value):
        return plain(dataclasses.asdict(value), not_finite=not_finite)
    if hasattr(value, "__array__"):
        return plain(np.asarray(value).tolist(), not_finite=not_finite)
    return not_finite(value) if isinstance(value, float) and not np.isfinite(value) else value


def as_numbers(value: Any) -> Any:
    """A number that was written with `not_finite=str`, or lists of them as tuples."""
    if isinstance(value, list):
        return tuple(map(as_numbers, value))
    return float(value) if value in NOT_FINITE else value


def fields_of(value: Any) -> dict[str, Any] | None:
    """The fields of a dataclass or a named tuple; None for other values, and for classes."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      ConfigError: the file cannot be read, or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if type(found) is not dict:
        raise ConfigError(f"{path} cannot be read: it holds no object in JSON")
    return found


def fits(value: Any, kind: Any) -> bool:
    """Whether a value of JSON is of a type; a list stands for a tuple, and a whole number for a float."""
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if isinstance(kind, types.UnionType):
        return any(fits(value, each) for each in arguments)
    if origin in (list, tuple):
        return type(value) is list and all(fits(item, arguments[0]) for item in value)
    if origin in (dict, Mapping):
        return type(value) is dict and all(fits(item, arguments[1]) for item in value.values())
    return kind is Any or type(value) in {float: (int, float), types.NoneType: (type(None),)}.get(kind, (kind,))


def describe_kind(kind: Any) -> str:
    """A type in words, such as "a whole number or null"."""
    if isinstance(kind, types.UnionType):
        return " or ".join(map(describe_kind, get_args(kind)))
    word, arguments = _WORDS.get(get_origin(kind) or kind, str(kind)), get_args(kind)
    if not arguments or arguments[-1] is Any:
        return word
    # An object's second argument is the type of its values.
    return f"{word} of {describe_kind(arguments[-1 if get_origin(kind) in (dict, Mapping) else 0])}"


def with_checksum(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, in JSON's types, and a checksum over them."""
    fields = plain(fields, not_finite=str)
    return {**fields, CHECKSUM: _checksum(fields)}


def check_fields(where: Path | str, fields: Any, kinds: Mapping[str, Any], *, optional: Collection[str] = ()) -> None:
    """Checks an object as a whole: which fields it has, their types, and its checksum, if it has one.

    Args:
      where: the file, for errors.
      fields: what was read.
      kinds: the type of each field.
      optional: fields that may be missing.

    Raises:
      ConfigError: with the file and the field.
    """
    if type(fields) is not dict:
        raise ConfigError(f"{where} is damaged: it holds no object in JSON")
    kinds = {**kinds, CHECKSUM: int}
    if missing := kinds.keys() - fields.keys() - {*optional, CHECKSUM}:
        raise ConfigError(f"{where} is damaged: it lacks {', '.join(sorted(missing))}")
    for name, value in fields.items():
        if name not in kinds:
            raise ConfigError(f"{where} is damaged: it has no field {name!r}: {nearest(name, kinds)}")
        if not fits(value, kinds[name]):
            raise ConfigError(
                f"{where} is damaged: {name} is {json.dumps(value)[:80]}, but must be {describe_kind(kinds[name])}"
            )
    rest = {name: value for name, value in fields.items() if name != CHECKSUM}
    if fields.get(CHECKSUM, _checksum(rest)) != _checksum(rest):
        raise ConfigError(
            f"{where} is damaged: its checksum is another than that of its contents; copy the file again, or, if you "
            f"changed it yourself, remove the field {CHECKSUM!r}"
        )


def _checksum(fields: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())

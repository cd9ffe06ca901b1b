"""Host: objects of JSON that are read back: the types of their fields, and a checksum over all of them."""

import json
import types
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

from grpo_jax.errors import ConfigError, nearest

CHECKSUM = "checksum"

_WORDS = {
    **{int: "a whole number", float: "a number", str: "a text", bool: "true or false", types.NoneType: "null"},
    **{list: "a list", tuple: "a list", dict: "an object", Mapping: "an object"},
}


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

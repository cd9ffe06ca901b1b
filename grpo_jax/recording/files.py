"""Host: files of JSON and of arrays, which are replaced as a whole, and checked as a whole when they are read."""

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import types
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import numpy as np

from grpo_jax.errors import ConfigError, nearest

CHECKSUM, CHECKSUMS = "checksum", "checksums"
"""The fields with the checksum over all other fields, and with the checksums of arrays by name."""

INFINITIES = ("inf", "-inf")
"""What stands in JSON for the infinities, which it lacks."""

_HEADER = "grpo_jax"  # the only entry of the metadata: safetensors does not keep the order of several
_WORDS = {
    **{int: "a whole number", float: "a number", str: "a text", bool: "true or false", types.NoneType: "null"},
    **{list: "a list", tuple: "a list", dict: "an object", Mapping: "an object"},
}

Arrays = dict[str, np.ndarray]


def plain(value: Any) -> Any:
    """`value` in JSON's types: arrays become lists, dataclasses objects, paths texts, infinity "inf", and NaN null."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value):
        return plain(dataclasses.asdict(value))
    if hasattr(value, "__array__"):
        return plain(np.asarray(value).tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def as_numbers(value: Any) -> Any:
    """A number that `plain` wrote, or lists of them as tuples."""
    if isinstance(value, list):
        return tuple(map(as_numbers, value))
    return float(value) if value in INFINITIES else value


def write_json(path: Path, value: Any) -> None:
    """Writes strict JSON (see `plain`) atomically: a reader finds the old file or the new one, never a part.

    Raises:
      TypeError: `value` contains something that JSON cannot express. The old file stays as it was.
    """
    write_text(Path(path), json.dumps(plain(value), indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a text atomically."""
    with replacement(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replacement(path: Path) -> Iterator[Path]:
    """A temporary path for the block to write to; the file then takes the place of `path`, if the block succeeds.

    The folder of the file is made if it does not exist.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def new_files(folder: Path) -> Iterator[Path]:
    """A temporary folder for the block to write to; its files move to `folder` if the block succeeds.

    Without success, such as on a full disk, nothing is left, and files that `folder` had stay as they were.
    """
    is_new = not folder.exists()
    # In an existing folder, as its parent may be on another file system.
    temporary = (folder.parent if is_new else folder) / f".{folder.name}.{os.getpid()}.tmp"
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in temporary.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if is_new:
            os.replace(temporary, folder)
        else:
            for path in temporary.iterdir():
                os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def folder_name(name: str) -> str:
    """The name with `_` for characters that a folder's name may not have."""
    return re.sub(r"[^\w.()-]+", "_", name)


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Writes a file of safetensors atomically; OSError if it cannot be written, for example to a full disk."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    with replacement(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode  # the usual one: safetensors would let only the owner read the file
        try:
            save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, temporary, dict(metadata))
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from error
        temporary.chmod(mode)


def write_checked(path: Path, arrays: Mapping[str, np.ndarray], fields: Mapping[str, Any]) -> None:
    """Writes arrays and fields in JSON's types to one file of safetensors, with checksums over both."""
    fields = with_checksum({**fields, CHECKSUMS: {name: _crc(array) for name, array in arrays.items()}})
    write_arrays(path, arrays, {_HEADER: json.dumps(fields)})


def read_checked(path: Path) -> tuple[Arrays, dict[str, Any]]:
    """The arrays and the fields that `write_checked` wrote; ConfigError if the file is missing or damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            fields = json.loads((file.metadata() or {}).get(_HEADER, "null"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    fields = without_checksum(f"the header of {path}", fields)
    checksums = fields.pop(CHECKSUMS)
    for name in {**checksums, **arrays}:
        if name not in arrays or _crc(arrays[name]) != checksums.get(name):
            raise ConfigError(f"{path} is damaged: {name} has changed since it was written")
    return arrays, fields


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ConfigError if it cannot be read, or holds something else."""
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
    fields = plain(fields)
    return {**fields, CHECKSUM: _crc_of_fields(fields)}


def without_checksum(name: str, fields: Any) -> dict[str, Any]:
    """The fields of an object that `with_checksum` made; ConfigError if they have changed since."""
    if type(fields) is not dict or fields.pop(CHECKSUM, None) != _crc_of_fields(fields):
        raise ConfigError(f"{name} has changed since it was written, or is none of grpo_jax")
    return fields


def check_fields(
    path: Path, fields: Mapping[str, Any], kinds: Mapping[str, Any], *, optional: Collection[str] = ()
) -> None:
    """Checks an object: its fields and their types, of which some are optional, and its checksum, if there is one.

    Raises:
      ConfigError: with the file and the field.
    """
    kinds = {**kinds, CHECKSUM: int}
    if missing := kinds.keys() - fields.keys() - {*optional, CHECKSUM}:
        raise ConfigError(f"{path} is damaged: it lacks {', '.join(sorted(missing))}")
    for name, value in fields.items():
        if name not in kinds:
            raise ConfigError(f"{path} is damaged: it has no field {name!r}: {nearest(name, kinds)}")
        if not fits(value, kinds[name]):
            raise ConfigError(
                f"{path} is damaged: {name} is {json.dumps(value)[:80]}, but must be {describe_kind(kinds[name])}"
            )
    rest = {name: value for name, value in fields.items() if name != CHECKSUM}
    if fields.get(CHECKSUM, _crc_of_fields(rest)) != _crc_of_fields(rest):
        raise ConfigError(
            f"{path} is damaged: its checksum does not match its contents; copy the file again, or, if you "
            f"changed it yourself, remove the field {CHECKSUM!r}"
        )


def _crc_of_fields(fields: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def _crc(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))

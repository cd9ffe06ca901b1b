"""Host: files of JSON and of arrays, which are replaced as a whole, and checked as a whole when they are read."""

import contextlib
import dataclasses
import json
import math
import os
import re
import tempfile
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import jax.numpy as jnp
import numpy as np

from grpo_jax.errors import ConfigError, first_line, nearest

FORMAT = 4
"""The format of a run's folder; readers refuse others."""

INFINITIES = ("inf", "-inf")
"""What stands in JSON for the infinities, which it lacks."""

_FIELDS = "fields"
_NUMBERS = re.compile(r'\[\n(?:\s*"?[-+.\w]+"?,?\n)+\s*\]')  # a list of numbers or words, in lines of JSON
Arrays = dict[str, np.ndarray]


def as_path(path: str | Path) -> Path:
    """The path that a user means, with the home folder for ~; every path that the library is given comes through here.

    Raises:
      ConfigError: it is empty or none, or there is no such user.
    """
    try:
        text = os.fspath(path)
        if not text or "\0" in text:
            raise ValueError("it is empty, or holds a zero character")
        return Path(text).expanduser()
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"{path!r} is no path: {error}; write one such as runs/mine") from error


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
    text = json.dumps(plain(value), indent=2, allow_nan=False)
    write_text(Path(path), _NUMBERS.sub(lambda found: f"[{' '.join(found[0][1:-1].split())}]", text) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a text atomically."""
    with replacement(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Errors of the disk name the path that was to be written."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # it says all of that already
            raise
        raise OSError(f"{path} cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def replacement(path: Path) -> Iterator[Path]:
    """A temporary path for the block to write to; the file then takes the place of `path`, if the block succeeds.

    The folder of the file is made if it does not exist. Raises OSError if the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()


@contextlib.contextmanager
def new_files(folder: Path) -> Iterator[Path]:
    """A temporary folder in `folder` for the block to write to; its files move there if the block succeeds.

    Without success, such as on a full disk, nothing is left, and files that `folder` had stay as they were.
    """
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with tempfile.TemporaryDirectory(dir=folder, prefix=".") as temporary:
                yield Path(temporary)
                for path in Path(temporary).iterdir():
                    os.replace(path, folder / path.name)
        except BaseException:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()
            raise


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


def write_archive(path: Path, fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Writes fields in JSON's types and arrays to one file, atomically: an .npz, as `numpy.load` reads it.

    The same contents give the same bytes.
    """
    fields = plain({"format": FORMAT, **fields}) | {"arrays": {name: str(each.dtype) for name, each in arrays.items()}}
    with replacement(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **{_FIELDS: json.dumps(fields, allow_nan=False)}, **arrays)


def read_archive(path: Path, kinds: Mapping[str, Any], *, only_fields: bool = False) -> tuple[dict[str, Any], Arrays]:
    """The fields and the arrays that `write_archive` wrote.

    Args:
      path: of the file.
      kinds: the types of the fields.
      only_fields: read no arrays.

    Raises:
      ConfigError: the file is missing, damaged or of another format.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            fields = json.loads(str(archive[_FIELDS]))
            types_by_name = fields.pop("arrays")
            arrays = {name: archive[name] for name in ([] if only_fields else types_by_name)}
        for name, array in arrays.items():
            if array.dtype.kind == "V":  # such as bfloat16
                arrays[name] = array.view(jnp.dtype(types_by_name[name]))
    except Exception as error:  # zipfile, zlib, json and NumPy raise many for what is damaged
        raise ConfigError(f"{path} is damaged or missing: {first_line(error)[:200]}") from error
    if (found := fields.pop("format", None)) != FORMAT:
        raise ConfigError(
            f"{path} has format {found!r}, but this version of grpo-jax reads format {FORMAT}: it is damaged, or of "
            f"another version ({fields.get('versions')}); use that one, or train again"
        )
    check_fields(path, fields, kinds)
    return fields, arrays


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in the lines of a file, without lines that were cut off or damaged; none if there is no file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for text in file:
            with contextlib.suppress(ValueError, RecursionError):
                line = json.loads(text)
                if type(line) is dict:
                    yield line


def add_lines(path: Path, lines: Iterable[Mapping[str, Any]], *, begin: int | None = None) -> None:
    """Adds objects to a file as lines of JSON (`plain`), from which it first removes iterations from `begin` on."""
    if begin is not None:
        found = (each for each in json_lines(path) if fits(each.get("iteration"), int))
        write_text(path, "".join(json.dumps(each) + "\n" for each in found if each["iteration"] < begin))
    with disk_errors(path), path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(plain(line), allow_nan=False) + "\n" for line in lines)


def read_json(path: Path, kind: Any = dict[str, Any]) -> Any:
    """What a file of JSON holds, by default an object; ConfigError if it cannot be read, or holds another type."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; restore the file, or move it away") from error
    if not fits(found, kind):
        raise ConfigError(f"{path} cannot be read: in JSON it must be {describe_kind(kind)}, and is not")
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
    """A type as Python writes it, such as "int" or "dict[str, int] | None"."""
    return str(kind).replace("typing.", "") if get_args(kind) else kind.__name__


def check_fields(path: Path, fields: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """Checks that an object has these fields, in their types; ConfigError with the file and the field."""
    if missing := kinds.keys() - fields.keys():
        raise ConfigError(f"{path} is damaged: it lacks {', '.join(sorted(missing))}")
    for name, value in fields.items():
        if name not in kinds:
            raise ConfigError(f"{path} is damaged: it has no field {name!r}: {nearest(name, kinds)}")
        if not fits(value, kinds[name]):
            raise ConfigError(f"{path} is damaged: {name} is {value!r:.80}, but must be {describe_kind(kinds[name])}")

"""What a value is, in JSON's types, as far as two processes can compare it: functions by their code and closures."""

import contextlib
import dataclasses
import dis
import functools
import hashlib
import inspect
import itertools
import json
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from grpo_jax.errors import ConfigError
from grpo_jax.importing import import_path

BYTECODE, UNKNOWN = "bytecode", "cannot be compared"
"""Keys: the version of Python whose byte code has this digest, and the type of a value that cannot be described."""

MAX_LENGTH = 1000
"""Characters of a text or a collection, in JSON; of a longer one only the digest is kept."""

MAX_DEPTH = 20
"""Objects within objects that are compared."""

DATA_OR_CODE = (
    *(types.NoneType, bool, int, float, str, list, tuple, dict, frozenset, np.generic, np.ndarray, jax.Array),
    *(type, types.FunctionType, types.MethodType, functools.partial),
)

_PACKAGE = Path(__file__).parents[1]


def identity(value: Any) -> Any:
    """The same for equal values in every process; different for different ones, as far as can be told.

    - A function is its name, byte code, closure and defaults, and what it names in its module: functions, classes and
      data. One of an installed package is its name, with the closure if it has one.
    - A class is its methods and data, an object its class and its fields. What changes as the object is used does not
      belong to it: where an object of this package keeps such, its attribute `identity` stands for it.
    - An array is its type, shape and digest.
    """
    return _describe(value, (), {})


def _describe(value: Any, within: tuple[int, ...], seen: dict[int, Any]) -> Any:
    """As `identity`.

    Args:
      value: any.
      within: the ids of the values that contain this one.
      seen: by their ids, the functions and classes that are described already: after that their name stands for them.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float):
        return value if value == value else "nan"  # equal to itself
    if isinstance(value, str):
        return _shortened(value)
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, np.ndarray | jax.Array):
        return _of_array(value)
    if id(value) in within:
        return f"{getattr(value, '__qualname__', type(value).__qualname__)}, in itself"
    within = (*within, id(value))
    part = functools.partial(_describe, within=within, seen=seen)
    if isinstance(value, Mapping):
        return _shortened({str(key): part(item) for key, item in value.items()})
    if isinstance(value, list | tuple) and not hasattr(value, "_asdict"):
        return _shortened([part(item) for item in value])
    if isinstance(value, set | frozenset):
        return _shortened(sorted(map(part, value), key=json.dumps))
    if isinstance(value, functools.partial):
        return {"partial": part(value.func), "arguments": part(value.args), "options": part(value.keywords)}
    if _is_installed(value) and import_path(value):
        return value.__qualname__
    if isinstance(value, types.FunctionType | type):
        if id(value) in seen:
            return value.__qualname__
        seen[id(value)] = value  # itself, so that its id stays its own
        return _of_class(value, part) if isinstance(value, type) else _of_function(value, part)
    if isinstance(value, types.MethodType):
        return {"method": part(value.__func__), "of": part(value.__self__)}
    if callable(value) and hasattr(value, "__wrapped__"):  # such as jax.jit(function)
        return part(inspect.unwrap(value))
    if _is_installed(type(value)) and hasattr(type(value), "identity"):
        return {"class": type(value).__qualname__, "identity": part(value.identity)}
    if (fields := _fields(value)) is None or len(within) > MAX_DEPTH:
        text = repr(value)
        return {UNKNOWN: type(value).__qualname__} if " at 0x" in text else _shortened(text)
    return {"class": part(type(value))} | {name: part(item) for name, item in fields.items()}


def check_same(saved: Any, now: Any, name: str = "") -> list[str]:
    """The paths of values of JSON that cannot be compared (see `identity`); ConfigError with the first that differs."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        if saved.get(BYTECODE) != now.get(BYTECODE) or (saved == now and UNKNOWN in now):
            return [name]
        fields = {**saved, **now}
        parts = [check_same(saved.get(field), now.get(field), f"{name}.{field}".lstrip(".")) for field in fields]
        return list(itertools.chain(*parts))
    if isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        if any(isinstance(part, Mapping) for part in now):
            parts = [check_same(*pair, f"{name}[{i}]") for i, pair in enumerate(zip(saved, now, strict=True))]
            return list(itertools.chain(*parts))
    if saved != now:
        raise ConfigError(
            f"{name} is {now!r:.200} here, and {saved!r:.200} in the checkpoints; to resume, use what the run was "
            "started with, or choose another folder (--out) for a new run"
        )
    return []


def _of_array(value: np.ndarray | jax.Array) -> str:
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.ascontiguousarray(value)
    return f"{array.dtype}{list(array.shape)} {_digest(array.tobytes())}"


def _of_function(function: types.FunctionType, part: Callable[[Any], Any]) -> dict[str, Any]:
    described: dict[str, Any] = {"function": function.__qualname__}
    if not _is_installed(function):
        instructions, names = [], {}
        for name, value in _instructions(function.__code__):
            constant = sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)
            instructions.append(f"{name} {value.co_name if isinstance(value, types.CodeType) else constant}")
            if name in ("LOAD_GLOBAL", "LOAD_NAME") and value in function.__globals__:
                names[value] = function.__globals__[value]
        version = f"Python {sys.version_info.major}.{sys.version_info.minor}"
        described["code"] = {BYTECODE: version, "digest": _digest("\n".join(instructions).encode())}
        described["names"] = {name: part(each) for name, each in names.items() if _is_data_or_code(each)}
    cells = {}
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a cell that is still empty
            cells[variable] = part(cell.cell_contents)
    defaults = [*(function.__defaults__ or ()), function.__kwdefaults__ or {}]
    described |= {"closure": cells, "defaults": part(defaults) if defaults != [{}] else None}
    return {name: each for name, each in described.items() if each}


def _of_class(kind: type, part: Callable[[Any], Any]) -> Any:
    """The methods and the data of a class and of its bases, except bases in installed packages."""
    if _is_installed(kind):
        return kind.__qualname__
    bases = [part(base) for base in kind.__bases__ if not _is_installed(base)]
    found = {"class": kind.__qualname__} | ({"base classes": bases} if bases else {})
    special = {"__call__"} if dataclasses.is_dataclass(kind) else {"__call__", "__init__"}
    for name, value in vars(kind).items():
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        elif isinstance(value, property | functools.cached_property):
            value = value.fget if isinstance(value, property) else value.func
        value = inspect.unwrap(value)
        is_made = isinstance(value, types.FunctionType) and _is_installed(value)  # such as a named tuple's _replace
        if (not name.startswith("__") or name in special) and _is_data_or_code(value) and not is_made:
            found[name] = part(value)
    return found


def _fields(value: Any) -> dict[str, Any] | None:
    """The fields of an object, without cached properties; None if it has no fields."""
    if (fields := fields_of(value)) is not None:
        return fields
    kind = type(value)
    if not hasattr(value, "__dict__") or kind.__module__.partition(".")[0] in sys.stdlib_module_names - {"__main__"}:
        return None  # one of Python's own, such as a lock or a path
    return {
        name: each
        for name, each in vars(value).items()
        if not isinstance(getattr(kind, name, None), functools.cached_property)
    }


def fields_of(value: Any) -> dict[str, Any] | None:
    """The fields of a dataclass or a named tuple; None for other values, and for classes."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def _instructions(code: types.CodeType) -> Iterator[tuple[str, Any]]:
    """Those of a function and of the functions in it; docstrings and the numbers of lines are not among them."""
    for instruction in dis.get_instructions(code):
        yield instruction.opname, instruction.argval
        if isinstance(instruction.argval, types.CodeType):
            yield from _instructions(instruction.argval)


def _is_data_or_code(value: Any) -> bool:
    """Whether a value that a function names is compared; modules, loggers, locks and the like are not."""
    is_wrapped = callable(value) and hasattr(value, "__wrapped__")
    return isinstance(value, DATA_OR_CODE) or dataclasses.is_dataclass(value) or is_wrapped


def _is_installed(value: Any) -> bool:
    """Whether a function or a class is of Python, of this package, or of one that pip has installed."""
    if isinstance(value, types.FunctionType):
        file = value.__code__.co_filename
    else:
        module = getattr(value, "__module__", None) or type(value).__module__
        if module.partition(".")[0] in sys.stdlib_module_names and module != "__main__":
            return True
        file = getattr(sys.modules.get(module), "__file__", None) or ""
    is_ours = any(Path(file).is_relative_to(folder) for folder in (_PACKAGE, Path(dis.__file__).parent))
    return is_ours or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _shortened(value: Any) -> Any:
    text = json.dumps(value, sort_keys=True)
    return value if len(text) <= MAX_LENGTH else f"{len(text)} characters {_digest(text.encode())}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]

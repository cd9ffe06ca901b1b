"""What a value is, in JSON's types, so that two processes can compare it: functions and classes by their source."""

import ast
import contextlib
import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import sys
import textwrap
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from grpo_jax.errors import ConfigError
from grpo_jax.importing import import_path

SOURCE, UNKNOWN = "source", "cannot be compared"
"""Keys: the hash of a function's or a class's source, and the type of a value that cannot be described."""

MAX_LENGTH = 1000
"""Characters of a text or a collection, in JSON; of a longer one only the digest is kept."""

_PACKAGE = Path(__file__).parents[1]


def identity(value: Any, seen: dict[int, Any] | None = None) -> Any:
    """The same for equal values in every process; different for different ones, as far as can be told.

    - A function or a class is its name and a hash of its source, one of an installed package its name alone; a function
      in a function also what it keeps of that one (its closure). What it calls is not compared.
    - An object is its class and its fields; where a class of this package has an attribute `identity`, that.
    - An array is its type, shape and digest.

    Args:
      value: any.
      seen: by their ids, what is described already: after that its name stands for it.
    """
    seen = {} if seen is None else seen
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float):
        return value if value == value else "nan"  # equal to itself
    if isinstance(value, str | types.ModuleType):
        return _shortened(getattr(value, "__name__", value))
    if isinstance(value, np.ndarray | jax.Array):
        return _of_array(value)
    part = functools.partial(identity, seen=seen)
    if isinstance(value, Mapping):
        return _shortened({str(key): part(item) for key, item in value.items()})
    if isinstance(value, list | tuple) and not hasattr(value, "_asdict"):
        return _shortened([part(item) for item in value])
    if isinstance(value, set | frozenset):
        return _shortened(sorted(map(part, value), key=json.dumps))
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if id(value) in seen or (_is_installed(value) and import_path(value)):
        return name
    seen[id(value)] = value  # itself, so that its id stays its own
    if isinstance(value, functools.partial):
        return {"partial": part(value.func), "arguments": part(value.args), "options": part(value.keywords)}
    if isinstance(value, types.FunctionType):
        found = {"function": name, SOURCE: _source(value), "closure": part(_closure(value))}
        found |= {"defaults": part([value.__defaults__, value.__kwdefaults__])}
        return {key: each for key, each in found.items() if each not in (None, {}, [None, None])}
    if isinstance(value, type):
        sources = [_source(each) for each in value.__mro__ if not _is_installed(each)]
        return {"class": name, SOURCE: UNKNOWN if UNKNOWN in sources else " ".join(sources)} if sources else name
    if isinstance(value, types.MethodType):
        return {"method": part(value.__func__), "of": part(value.__self__)}
    if callable(value) and hasattr(value, "__wrapped__"):  # such as jax.jit(function)
        return part(inspect.unwrap(value))
    if _is_installed(type(value)) and hasattr(type(value), "identity"):
        return {"class": name, "identity": part(value.identity)}
    if (fields := _fields(value)) is None:
        return {UNKNOWN: name} if " at 0x" in repr(value) else _shortened(repr(value))
    return {"class": part(type(value))} | {field: part(each) for field, each in fields.items()}


def check_same(saved: Any, now: Any, name: str = "") -> list[str]:
    """The paths of values of JSON that cannot be compared (see `identity`); ConfigError with the first that differs."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        if saved == now and UNKNOWN in (*now, now.get(SOURCE)):
            return [name]
        fields = {**saved, **now}
        parts = [check_same(saved.get(field), now.get(field), f"{name}.{field}".lstrip(".")) for field in fields]
        return list(itertools.chain(*parts))
    if isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        if any(isinstance(part, Mapping) for part in now):
            parts = [check_same(*pair, f"{name}[{i}]") for i, pair in enumerate(zip(saved, now, strict=True))]
            return list(itertools.chain(*parts))
    if saved != now:
        what = f"{name} is {now!r:.200} here, and {saved!r:.200} in the checkpoints"
        if name.rpartition(".")[2] == SOURCE:
            what = f"{name.removesuffix(f'.{SOURCE}')} has another source here than in the checkpoints (its hash)"
        raise ConfigError(
            f"{what}; to resume, use what the run was started with, or choose another folder (--out) for a new run"
        )
    return []


def _of_array(value: np.ndarray | jax.Array) -> str:
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.ascontiguousarray(value)
    return f"{array.dtype}{list(array.shape)} {_digest(array.tobytes())}"


def _source(value: Any) -> str | None:
    """A hash of a function's or a class's source without comments and layout; `UNKNOWN` if there is none.

    None for what Python makes itself, such as the methods of a dataclass, and for what is installed.
    """
    if _is_installed(value):
        return None
    if isinstance(value, types.FunctionType) and value.__code__.co_filename == "<string>":
        return UNKNOWN  # from Python 3.13 on, `getsource` takes this for the text after python -c
    try:
        text = textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError):
        return UNKNOWN
    with contextlib.suppress(SyntaxError):  # of a lambda in the middle of an expression
        text = ast.unparse(ast.parse(text))
    return _digest(text.encode())


def _closure(function: types.FunctionType) -> dict[str, Any]:
    """What a function keeps of the function that it is defined in."""
    kept = {}
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a cell that is still empty
            kept[variable] = cell.cell_contents
    return kept


def _fields(value: Any) -> dict[str, Any] | None:
    """The fields of an object, without cached properties; None if it has no fields."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()
    kind = type(value)
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if not hasattr(value, "__dict__") or kind.__module__.partition(".")[0] in sys.stdlib_module_names - {"__main__"}:
        return None  # one of Python's own, such as a lock or a path
    cached = {name for name in vars(value) if isinstance(getattr(kind, name, None), functools.cached_property)}
    return {name: each for name, each in vars(value).items() if name not in cached}


def _is_installed(value: Any) -> bool:
    """Whether a function or a class is of Python, of this package, or of one that pip has installed."""
    if isinstance(value, types.FunctionType):
        file = value.__code__.co_filename
    else:
        module = getattr(value, "__module__", None) or type(value).__module__
        if module.partition(".")[0] in sys.stdlib_module_names and module != "__main__":
            return True
        file = getattr(sys.modules.get(module), "__file__", None) or ""
    is_ours = any(Path(file).is_relative_to(folder) for folder in (_PACKAGE, Path(ast.__file__).parent))
    return is_ours or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _shortened(value: Any) -> Any:
    text = json.dumps(value, sort_keys=True)
    return value if len(text) <= MAX_LENGTH else f"{len(text)} characters {_digest(text.encode())}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]

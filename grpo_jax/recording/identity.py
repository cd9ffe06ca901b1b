"""What a value is, in JSON's types, so that two processes can compare it: functions and classes by their source."""

import ast
import contextlib
import functools
import hashlib
import inspect
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
from grpo_jax.recording.files import as_numbers
from grpo_jax.training.checks import BUDGETS

SOURCE = "source"
"""The key of the hash of a function's or a class's source."""

_BUDGETS = {f"hyperparams.{name}" for name in BUDGETS}
_PACKAGE = Path(__file__).parents[1]


def identity(value: Any, seen: dict[int, Any] | None = None) -> Any:
    """The same for equal values in every process; different for different ones, as far as can be told.

    - A function or a class is its name and a hash of its source, one of an installed package its name alone; a function
      also its defaults, and what it keeps of the function that it is in (its closure). What it calls is not compared.
    - An object is its class and its fields; where a class of this package has an attribute `identity`, that. One
      without fields that can be compared, such as a lock, is its name.
    - An array is its type, shape and digest.

    Args:
      value: any.
      seen: by their ids, what is described already: after that its name stands for it.
    """
    seen = {} if seen is None else seen
    part = functools.partial(identity, seen=seen)
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value if value == value else "nan"  # equal to itself
    if isinstance(value, np.ndarray | jax.Array):
        is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        array = np.ascontiguousarray(jax.random.key_data(value) if is_key else value)
        return f"{array.dtype}{list(array.shape)} {_digest(array.tobytes())}"
    if isinstance(value, Mapping):
        return {str(key): part(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(part, value), key=json.dumps)
    if isinstance(value, list | tuple) and not hasattr(value, "_asdict"):
        return [*map(part, value)]
    if isinstance(value, types.ModuleType):
        return value.__name__
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if id(value) in seen or (_is_installed(value) and import_path(value)):
        return name
    seen[id(value)] = value  # itself, so that its id stays its own
    if isinstance(value, functools.partial):
        return {"partial": part(value.func), "arguments": part(value.args), "options": part(value.keywords)}
    if isinstance(value, types.MethodType):
        return {"method": part(value.__func__), "of": part(value.__self__)}
    if isinstance(value, types.FunctionType):
        kept = {"closure": inspect.getclosurevars(value).nonlocals}
        kept |= {"defaults": value.__defaults__, "defaults by name": value.__kwdefaults__}
        return {"function": name} | _source(value) | {what: part(each) for what, each in kept.items() if each}
    if isinstance(value, type):
        return {"class": name} | _source(*value.__mro__)
    if hasattr(value, "__wrapped__"):  # such as jax.jit(function)
        return part(inspect.unwrap(value))
    if _is_installed(type(value)) and hasattr(type(value), "identity"):
        return {"class": name, "identity": part(value.identity)}
    if (fields := _fields(value)) is None:
        return name if " at 0x" in repr(value) else repr(value)
    return {"class": part(type(value))} | {field: part(each) for field, each in fields.items()}


def check_same(saved: Any, now: Any, name: str = "") -> None:
    """Raises ConfigError with the path of the first value of JSON that differs, but for a budget that was raised."""
    if isinstance(saved, list) and isinstance(now, list):
        parts = [*now, *(each for part in now if isinstance(part, list) for each in part)]
        if any(isinstance(part, Mapping) for part in parts):
            saved, now = dict(enumerate(saved)), dict(enumerate(now))
    others = {*saved} ^ {*now} if name in ("config", "hyperparams") else ()
    if isinstance(saved, Mapping) and isinstance(now, Mapping) and not others:
        for field in {**saved, **now}:
            check_same(saved.get(field), now.get(field), f"{name}.{field}".lstrip("."))
    elif saved != now and not (name in _BUDGETS and _is_raised(saved, now)):
        what = f"{name} is {now!r:.200} here, and {saved!r:.200} in the checkpoints"
        if others:
            what = f"the checkpoints are of another version of grpo_jax: their {name} differs in {', '.join(others)}"
        if name == "keys" and saved and now and len(saved) != len(now):
            what = f"there are {len(now)} keys here, one for each row, and {len(saved)} in the checkpoints"
        if name.endswith(f".{SOURCE}"):
            what = f"{name.removesuffix(f'.{SOURCE}')} has another source here than in the checkpoints (its hash)"
        raise ConfigError(
            f"{what}; to resume, use what the run was started with (only its budget may be larger), or choose another "
            "folder for a new run"
        )


def _is_raised(saved: Any, now: Any) -> bool:
    """Whether numbers are at least as large as before; not where there were none, or are none."""
    before, after = (np.array(as_numbers(each), float) for each in (saved, now))
    return before.shape == after.shape and bool(np.all(after >= before))


def _source(*parts: Any) -> dict[str, str]:
    """A hash of the code of a function, or of a class and its bases.

    Empty for what is installed, and for what has no source, such as the methods of a dataclass.
    """
    texts = []
    for part in (part for part in parts if not _is_installed(part)):
        with contextlib.suppress(OSError, TypeError):
            texts.append(inspect.getsource(part))
            with contextlib.suppress(SyntaxError):  # of a part of a statement, as a lambda may be
                texts[-1] = _code(texts[-1])
    return {SOURCE: _digest("\n".join(texts).encode())} if texts else {}


def _code(source: str) -> str:
    """The source without comments, docstrings and layout."""
    tree = ast.parse(textwrap.dedent(source))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(node):
            del node.body[0]
    return ast.unparse(tree)


def _fields(value: Any) -> dict[str, Any] | None:
    """The fields of an object, without cached properties; None if it has no fields."""
    if isinstance(value, tuple):
        return value._asdict()
    if not hasattr(value, "__dict__") or _is_of_python(type(value).__module__):  # such as a lock or a path
        return None
    cached = {name for name in vars(value) if isinstance(getattr(type(value), name, None), functools.cached_property)}
    return {name: each for name, each in vars(value).items() if name not in cached}


def _is_installed(value: Any) -> bool:
    """Whether a function or a class is of Python, of this package, or of one that pip has installed."""
    module = getattr(value, "__module__", None) or type(value).__module__
    if isinstance(value, types.FunctionType):
        file = Path(value.__code__.co_filename)
    elif _is_of_python(module):
        return True
    else:
        file = Path(getattr(sys.modules.get(module), "__file__", None) or "")
    return file.is_relative_to(_PACKAGE) or not {"site-packages", "dist-packages"}.isdisjoint(file.parts)


def _is_of_python(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names - {"__main__"}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]

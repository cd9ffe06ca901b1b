"""Python objects by import path, "package.module:name", which stand for environments, networks and the like."""

import importlib
import importlib.metadata
import inspect
import sys
from typing import Any

from grpo_jax.errors import ConfigError, nearest


def import_object(path: str, what: str, *, instead: str = "") -> Any:
    """The object at an import path.

    Args:
      path: "package.module:name", of a module on Python's path.
      what: what the object is for, such as "environment", for the error.
      instead: what else may stand before the colon, for the error.

    Raises:
      ConfigError: the module cannot be imported, or has no such name.
    """
    module, _, name = path.partition(":")
    where = f"{what} {path!r}"
    try:
        if not all(part.isidentifier() for part in module.split(".")):
            raise ImportError("not a module name")
        found = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{where}: cannot import {module!r} ({error}); before the colon write a module on Python's path{instead}"
        ) from error
    if not hasattr(found, name):
        known = [public for public in vars(found) if not public.startswith("_")]
        raise ConfigError(f"{where}: {module!r} has no {name!r}: {nearest(name, known)}")
    return getattr(found, name)


def pip_install(extra: str) -> str:
    """The command that installs what an extra of this package needs: by its packages, as ours is on no index."""
    try:
        requirements = importlib.metadata.requires("grpo-jax") or []
    except importlib.metadata.PackageNotFoundError:  # a clone that is on Python's path, but not installed
        requirements = []
    parts = (each.replace('"', "'").split("; extra == ") for each in requirements)
    packages = [f"'{name}'" for name, *when in parts if when == [f"'{extra}'"]]
    return f"pip install {' '.join(packages)}" if packages else f"pip install '.[{extra}]' in a clone"


def is_custom(value: Any) -> bool:
    """Whether the value of a field is custom: a function or an import path, not a name that this package knows."""
    return not isinstance(value, str) or ":" in value


def import_custom(value: Any, what: str) -> Any:
    """The object at an import path (see `import_object`); any other value is returned unchanged."""
    return import_object(value, what) if isinstance(value, str) and ":" in value else value


def import_path(value: Any) -> str | None:
    """The import path of a class, a function or an object that a module holds; None if it has none."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not module or not name or module == "__main__":
        return None
    return f"{module}:{name}" if getattr(inspect.getmodule(value), name, None) is value else None


def held_name(value: Any) -> str | None:
    """The import path of an equal value that a module holds, of a constant of a script its name alone; or None."""
    main = sys.modules["__main__"]
    for module in sorted(sys.modules.values(), key=lambda module: module is main):
        for name, held in [*getattr(module, "__dict__", {}).items()]:
            is_fixed = name.isupper() if module is main else not name.startswith("_")  # else such as of a loop
            if is_fixed and type(held) is type(value) and held == value:
                return name if module is main else f"{module.__name__}:{name}"
    return None

"""Environments of gymnax by name: each imports its own module only, as all of them import matplotlib and seaborn."""

import ast
import importlib
import importlib.util
import pathlib
import sys
import types
from typing import Any

from grpo_jax.errors import ConfigError, nearest


def registered(name: str) -> Any:
    """The environment that gymnax registers under a name."""
    classes, known = _classes(), names()
    if name not in known:
        raise ConfigError(
            f"unknown environment {name!r}: {nearest(name, known)} (for a custom one, write 'package.module:Name')"
        )
    try:
        return _import_class(*classes[name])() if classes else importlib.import_module("gymnax").make(name)[0]
    except OSError as error:  # MNISTBandit's images
        raise ConfigError(f"{name!r} needs data that could not be downloaded: {error}") from error


def names() -> list[str]:
    """The names that gymnax registers."""
    return list(_classes() or importlib.import_module("gymnax").registered_envs)


def _classes() -> dict[str, tuple[str, str]]:
    """The module and class of each name, read from the source of gymnax's registry.

    Empty if the source looks otherwise, and once all of gymnax is imported: only then somebody can register more.
    """
    if "gymnax.registration" in sys.modules:
        return {}
    (folder,) = importlib.util.find_spec("gymnax").submodule_search_locations
    body = ast.parse(pathlib.Path(folder, "registration.py").read_text()).body
    packages = {alias.name: node.module for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}
    tables = [node.value for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict)]
    items = [item for table in tables for item in zip(table.keys, table.values, strict=True)]
    try:
        return {key.value: (f"{packages[value.value.id]}.{value.value.id}", value.attr) for key, value in items}
    except (AttributeError, KeyError):
        return {}


def _import_class(module: str, name: str) -> Any:
    """The class of a module in gymnax, without the other modules that its packages import."""
    for package in ("gymnax", "gymnax.environments", module.rpartition(".")[0]):
        if package not in sys.modules:
            deferred = importlib.util.module_from_spec(importlib.util.find_spec(package))
            deferred.__class__ = _Deferred
            sys.modules[package] = deferred
            parent, _, child = package.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, deferred)
    return getattr(importlib.import_module(module), name)


class _Deferred(types.ModuleType):
    """A package whose `__init__` runs once a name is missing that is no module, such as `gymnax.make`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of Python's own, such as those that tools ask every module for
            raise AttributeError(name)
        if importlib.util.find_spec(f"{self.__name__}.{name}"):
            return importlib.import_module(f"{self.__name__}.{name}")
        self.__class__ = types.ModuleType
        try:
            self.__spec__.loader.exec_module(self)
        except BaseException:
            self.__class__ = _Deferred
            raise
        return getattr(self, name)

"""The error for configurations that cannot run, and helpers for its message."""

import difflib
import operator
from collections.abc import Iterable
from typing import Any

import jax

LARGEST_COUNT = 2**31 - 1


class ConfigError(ValueError):
    """A configuration that cannot run. The message says what is wrong, why, and what to write instead."""


def as_count(name: str, value: Any, why: str = "") -> int:
    """A positive integer (Python's or NumPy's) of at most 2^31 - 1, the largest int32, as an int.

    Raises:
      ConfigError: for any other value; the message has `name` and the reason `why`.
    """
    try:
        count = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = 0
    if count > LARGEST_COUNT:
        raise ConfigError(f"{name}={count} is more than {LARGEST_COUNT}, the largest int32; use fewer")
    if count >= 1:
        return count
    reason = f": {why}" if why else ""
    instead = (
        f"write {value:.0f}" if isinstance(value, float) and value >= 1 and value.is_integer() else "use 1 or more"
    )
    raise ConfigError(f"{name}={value!r} is not a positive integer{reason}; {instead}")


def nearest(name: str, known: Iterable[str]) -> str:
    """For messages about an unknown name: the known names that are most similar to it, or all if none is."""
    known = sorted(known)
    folded = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), folded, n=3, cutoff=0.4)
    if not close:
        return "known: " + ", ".join(known)
    return "did you mean " + " or ".join(repr(folded[name]) for name in close) + "?"


class KnownFields:
    """A dataclass whose constructor names the nearest field for one that it does not have."""

    def __new__(cls, *arguments: Any, **fields: Any) -> Any:
        """Raises ConfigError for an unknown field."""
        for name, value in fields.items():
            if name not in cls.__dataclass_fields__:
                raise ConfigError(cls._unknown_field(name, value))
        return super().__new__(cls)

    @classmethod
    def _unknown_field(cls, name: str, value: Any) -> str:
        return f"{cls.__name__} has no field {name!r}: {nearest(name, cls.__dataclass_fields__)}"


def describe_function(field: str, value: Any) -> str:
    """The field of a config with its value: a name or a path in quotes, or the name of a function."""
    return f"{field}={getattr(value, '__qualname__', repr(value))}"


def describe_arrays(tree: Any) -> str:
    """Dtypes and shapes, such as float32[3, 2]."""
    described = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree)
    return described if isinstance(described, str) else str(described).replace("'", "")


def are_alike(tree: Any, other: Any) -> bool:
    """Whether two trees of arrays have the same structure, shapes and dtypes."""

    def types(tree):
        return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]

    return jax.tree.structure(tree) == jax.tree.structure(other) and types(tree) == types(other)


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")

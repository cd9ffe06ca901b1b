"""What mistakes in a configuration have in common."""

import difflib
import operator
from collections.abc import Iterable
from typing import Any


class ConfigError(ValueError):
    """A run that cannot be as it was asked for: says what is wrong, why, and what to write instead."""


def as_count(name: str, value: Any, why: str = "") -> int:
    """The value as Python's int, if it is a positive integer, of Python or of NumPy; else a ConfigError."""
    try:
        count = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = 0
    if count >= 1:
        return count
    reason = f": {why}" if why else ""
    instead = (
        f"write {value:.0f}" if isinstance(value, float) and value >= 1 and value.is_integer() else "use 1 or more"
    )
    raise ConfigError(f"{name}={value!r} is not a positive integer{reason}; {instead}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The part of a message about an unknown name that says what was probably meant."""
    known = sorted(known)
    folded = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), folded, n=3, cutoff=0.4)
    if not close:
        return "known: " + ", ".join(known)
    return "did you mean " + " or ".join(repr(folded[name]) for name in close) + "?"

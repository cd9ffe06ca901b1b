"""What mistakes in a configuration have in common."""

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A run that cannot be as it was asked for: says what is wrong, why, and what to write instead."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The part of a message about an unknown name that says what was probably meant."""
    known = sorted(known)
    folded = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), folded, n=3, cutoff=0.4)
    if not close:
        return "known: " + ", ".join(known)
    return "did you mean " + " or ".join(repr(folded[name]) for name in close) + "?"

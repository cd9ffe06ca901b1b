"""What error messages share."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """The part of a message about an unknown name that says what was probably meant."""
    known = sorted(known)
    folded = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), folded, n=3, cutoff=0.4)
    return "did you mean " + " or ".join(repr(folded[c]) for c in close) + "?" if close else "known: " + ", ".join(known)

"""What the value of a flag may be, as a type of its field: a count, a seed, a file to write."""

import math
import tempfile
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from grpo_jax.errors import LARGEST_COUNT, ConfigError


class Between(NamedTuple):
    """Numbers from `low` to `high`, in the words of an error."""

    low: float
    high: float
    words: str

    def problem(self, value: float) -> str:
        """What is wrong with a value; empty if nothing is."""
        return "" if self.low <= value <= self.high else f"is not {self.words}"


class ToWrite(NamedTuple):
    """A path at which a file, or a new folder, can be written, in a folder that exists or can be made."""

    is_file: bool = True

    def problem(self, value: Path) -> str:
        """What is wrong with a path; empty if nothing is."""
        try:
            if self.is_file and value.is_dir():
                return f"is a folder; name a file in it, such as {value / 'results.json'}"
            there = next(part for part in (value, *value.parents) if part.exists())
            if not there.is_dir() and there != value:
                return f"cannot be written, as {there} is a file"
            with tempfile.TemporaryFile(dir=there if there.is_dir() else there.parent):
                return ""
        except OSError as error:
            return f"cannot be written: {error.strerror}"


_LEAST = math.ulp(0.0)  # the smallest positive number

Count = Annotated[int, Between(1, LARGEST_COUNT, f"a whole number from 1 to {LARGEST_COUNT}")]
CountOrNone = Annotated[int, Between(0, LARGEST_COUNT, f"a whole number from 0 to {LARGEST_COUNT}")]
Seeds = Annotated[int, Between(1, 2**20, "a whole number from 1 to 1048576")]  # keys of more might fill the memory
Steps = Annotated[int, Between(1, 2**53, "a whole number from 1 to 2^53")]  # exact in float64
# A key has 32 bits of its seed, so that other numbers would be equal to one of these.
Seed = Annotated[int, Between(0, 2**32 - 1, "a whole number from 0 to 4294967295")]
NotNegative = Annotated[float, Between(0.0, math.inf, "a number of at least 0")]
Finite = Annotated[float, Between(-1e38, 1e38, "a number that float32 can hold")]
Share = Annotated[float, Between(_LEAST, 1.0, "a number above 0 and at most 1")]
OutFile = Annotated[Path, ToWrite()]
OutFolder = Annotated[Path, ToWrite(is_file=False)]


def check(flag: str, annotation: Any, value: Any) -> None:
    """Checks a value against the limits in the type of its field: of a number or path, of one or None, of a tuple.

    Raises ConfigError if it is not within them; the message names the flag.
    """
    if value is None or isinstance(value, str):
        return
    if get_origin(annotation) is tuple:
        for part in value:
            check(flag, get_args(annotation)[0], part)
        return
    for limits in getattr(annotation, "__metadata__", ()):
        if isinstance(limits, Between | ToWrite) and (problem := limits.problem(value)):
            shown = f"{value:g}" if isinstance(value, float) else value
            raise ConfigError(f"{flag} {shown} {problem}")
    for part in get_args(annotation):
        check(flag, part, value)

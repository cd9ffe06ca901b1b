"""Flags, and their mistakes in one line."""

import dataclasses
from typing import Annotated

import pytest
import tyro

from grpo_jax.commands.harness.parsing import parse_flags, parse_known_flags
from grpo_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Part:
    width: int = 3
    """Of the part."""


@dataclasses.dataclass
class Arguments:
    """Does something."""

    folders: Annotated[tuple[str, ...], tyro.conf.Positional]
    """What it reads."""
    part: Part = Part()
    options: dict[str, float] = dataclasses.field(default_factory=dict)
    """Of its own."""
    out: str | None = None
    """Where it writes."""


def test_flags_fill_a_dataclass_and_the_dataclasses_in_it():
    assert parse_flags(Arguments, ["a", "b", "--width", "4"]) == Arguments(("a", "b"), Part(4))
    assert parse_flags(Arguments, [], default=Arguments((), Part(5), out="there")).part == Part(5)
    assert parse_flags(Arguments, ["--options", "x", "1"]).options == {"x": 1.0}
    assert parse_known_flags(Arguments, ["--out", "x", "--other", "1"]) == (Arguments((), out="x"), ["--other", "1"])


@pytest.mark.parametrize(
    "flags, message",
    {
        "--widht 4": r"Unrecognized options: --widht, 4; did you mean --width\?$",
        "--width wide": r"Error parsing --width: .*'wide'; see .* --help$",
    }.items(),
)
def test_a_mistake_is_one_line(flags, message):
    with pytest.raises(ConfigError, match=message):
        parse_flags(Arguments, flags.split())

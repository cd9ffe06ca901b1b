"""Dataclasses from the flags of a command line: values within their limits, errors in one line."""

import contextlib
import dataclasses
import functools
import inspect
import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from grpo_jax.commands.harness import limits
from grpo_jax.commands.harness.short_help import FEW, field_words, flat_fields, invocation, print_short_help
from grpo_jax.errors import OTHER_WORDS, ConfigError, nearest

T = TypeVar("T")

KINDS = {"FLOAT": "a number, such as 0.5 or 1e6", "INT": "a whole number, such as 64"}


def parse_flags(
    arguments: type[T],
    flags: Sequence[str] | None = None,
    *,
    default: T | None = None,
    registry: ConstructorRegistry | None = None,
    complete: Callable[[dict[str, Any]], None] = lambda values: None,
) -> T:
    """The dataclass of flags, by default those of the command line; fields of dataclasses in it are flags as well.

    `complete` may change its values before dataclasses are made of them.
    Raises ConfigError if a flag is unknown, has a wrong value, or one beyond the limits of its type (`limits`).
    """
    return _parse(arguments, flags, default, registry, complete)[0]


def parse_known_flags(arguments: type[T], flags: Sequence[str] | None = None) -> tuple[T, list[str]]:
    """As `parse_flags`, and the flags that are unknown."""
    return _parse(arguments, flags, allow_unknown=True)


def peek(arguments: type[T], flags: Sequence[str] | None = None) -> T:
    """The few flags on which the defaults of others depend, whatever else is on the command line."""
    with one_line_errors():
        return tyro.cli(arguments, args=flags, return_unknown_args=True, add_help=False)[0]


def _parse(arguments, flags, default=None, registry=None, complete=lambda values: None, allow_unknown=False):
    flags = sys.argv[1:] if flags is None else list(flags)
    flags = [
        re.sub(r"^(--[\w-]+=|)~(?=/|$)", rf"\g<1>{Path.home()}", word) for word in flags
    ]  # a shell leaves --out=~/x
    if "--help-all" in flags:
        flags = ["--help"]
    elif {"-h", "--help"} & {*flags} and len(found := flat_fields(arguments, default)) > FEW:
        print_short_help(arguments, found)
        sys.exit(0)
    if not allow_unknown:
        check_flags(flags, arguments, default)
    registry = ConstructorRegistry() if registry is None else registry
    registry.struct_rule(_of_dataclass)
    with one_line_errors():
        parsed = tyro.cli(
            arguments,
            prog=invocation(),
            description=inspect.cleandoc(arguments.__doc__ or ""),
            args=flags,
            default=default,
            return_unknown_args=allow_unknown,
            config=(tyro.conf.OmitArgPrefixes,),
            registry=registry,
        )
    unmade, unknown = parsed if allow_unknown else (parsed, [])
    complete(unmade.keywords)
    return _construct(unmade, {word.replace("_", "-") for word in flags}), unknown


def check_flags(flags: Sequence[str], arguments: type, default: Any) -> None:
    """Raises ConfigError for an unknown flag where others are needed, as tyro names only those that are missing."""
    fields = flat_fields(arguments, default)
    needed = [name for name, field in fields.items() if field.default is dataclasses.MISSING]
    given = {word.partition("=")[0][2:].replace("-", "_") for word in flags if word.startswith("--")}
    unknown = sorted(given - {*fields, *(f"no_{name}" for name in fields), "help"})
    if needed and unknown:
        flag, *known = (f"--{name.replace('_', '-')}" for name in (unknown[0], *fields))
        raise ConfigError(f"unknown flag {flag}: {nearest(flag, known)}")


class _Unmade(functools.partial):
    """A dataclass whose constructor is called after the flags are parsed, so that its errors remain its own."""


def _of_dataclass(info: StructTypeInfo) -> StructConstructorSpec | None:
    """The rule by which tyro takes a dataclass apart; fields that a default lacks have those of their class."""
    if not dataclasses.is_dataclass(info.type):
        return None

    def unmade(**values):
        return _Unmade(info.type, **values)

    unmade.__doc__ = (info.type.__doc__ or "").partition("\n")[0]
    hints, fields = get_type_hints(info.type, include_extras=True), []
    for field in dataclasses.fields(info.type):
        made = tyro.MISSING if field.default is dataclasses.MISSING else field.default
        made = made if field.default_factory is dataclasses.MISSING else field.default_factory()
        words = functools.partial(field_words, info.type, field.name)
        fields.append(StructFieldSpec(field.name, hints[field.name], getattr(info.default, field.name, made), words))
    return StructConstructorSpec(unmade, tuple(fields))


def _construct(unmade: _Unmade, given: set[str]) -> Any:
    """The dataclass of checked values; `given` are the words of the command line."""
    hints, values = get_type_hints(unmade.func, include_extras=True), {}
    for name, value in unmade.keywords.items():
        word = f"--{name.replace('_', '-')}"
        if value in ((), {}) and word in given:
            raise ConfigError(f"{word} has no value; write one or several after it, or leave it out")
        limits.check(word, hints[name], value)
        values[name] = _construct(value, given) if isinstance(value, _Unmade) else value
    return unmade.func(**values)


def chosen(known: Mapping[str, T], names: Sequence[str], kind: str) -> dict[str, T]:
    """Those with one of the names, in this order, or all without names; raises ConfigError for an unknown name."""
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown {kind} {name!r}: {nearest(name, known)}")
    return {name: known[name] for name in names or known}


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Raises ConfigError with what tyro would print in a box: the mistake, and similar flags."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            yield
    except SystemExit as stop:
        if not stop.code:
            raise
        sections: list[list[str]] = [[]]
        for line in printed.getvalue().splitlines()[1:]:  # without the title
            text = re.sub("\x1b\\[[0-9;]*m", "", line).strip(" │╰╯")
            sections.append([]) if set(text) <= {"─", "-"} else sections[-1].append(text)
        message, *others = filter(None, sections)
        similar = [
            line.split()[0].rstrip(",")
            for heading, *lines in others
            for line in lines
            if line.startswith("--") and heading.startswith(("Perhaps you meant", "Arguments similar"))
        ]
        advice = f"did you mean {' or '.join(similar)}?" if similar else f"see {invocation()} --help"
        raise ConfigError(_in_plain_words(" ".join(message)) or f"{' '.join(message)}; {advice}") from None


def _in_plain_words(message: str) -> str | None:
    """What to write where a value does not parse, or a flag has several; None for any other mistake."""
    if (found := re.match(r"Unrecognized options: --([\w-]+)", message)) and (
        field := OTHER_WORDS.get(found[1].replace("-", "_"))
    ):
        return f"--{found[1]} is --{field.replace('_', '-')} here"
    if found := re.match(r"Unrecognized options: ([^-\s].*)", message):
        return (
            f"{found[1]!r} follows a flag that has its value, or no flag; for several values of a setting use grpo-jax "
            "sweep, such as grpo-jax sweep --learning-rate 1e-3 1e-2"
        )
    if found := re.match(r"Error parsing (--\S+): .*?\['(.*)'\]\.?$", message):
        flag, value = found[1], found[2].replace("', '", " ")
        if "," in value:
            return f"{flag} {value}: values are separated by spaces; write {flag} {' '.join(value.split(','))}"
        if kind := next((words for name, words in KINDS.items() if name in message), None):
            return f"{flag} {value}: {value!r} is not {kind}"
    if found := re.match(r"Error parsing (--\S+): (invalid literal for int|could not convert).*: '(.*)'", message):
        kind = KINDS["INT" if found[2].endswith("int") else "FLOAT"]
        return f"{found[1]} {found[3]}: {found[3]!r} is not {kind}"
    return None

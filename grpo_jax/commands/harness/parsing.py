"""Dataclasses from the flags of a command line, by tyro: values within their limits, and a short help."""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from grpo_jax.commands.harness import limits
from grpo_jax.commands.harness.short_help import FEW, Field, field_words, flat_fields, invocation, print_short_help
from grpo_jax.errors import OTHER_WORDS, ConfigError, nearest

T = TypeVar("T")


def parse_flags(
    arguments: type[T],
    flags: Sequence[str] | None = None,
    *,
    default: T | None = None,
    registry: ConstructorRegistry | None = None,
    complete: Callable[[dict[str, Any]], None] = lambda values: None,
) -> T:
    """The dataclass of flags, by default those of the command line; fields of dataclasses in it are flags as well.

    `complete` may change its values before dataclasses are made of them. A flag that is unknown or whose value has
    another type ends the process with tyro's message; a value beyond the limits of its type raises ConfigError.
    """
    return _parse(arguments, flags, default, registry, complete)[0]


def parse_known_flags(arguments: type[T], flags: Sequence[str] | None = None) -> tuple[T, list[str]]:
    """As `parse_flags`, and the flags that are unknown."""
    return _parse(arguments, flags, allow_unknown=True)


def peek(arguments: type[T], flags: Sequence[str] | None = None) -> T:
    """The few flags on which the defaults of others depend, whatever else is on the command line."""
    return tyro.cli(arguments, args=flags, return_unknown_args=True, add_help=False)[0]


def _parse(arguments, flags, default=None, registry=None, complete=lambda values: None, allow_unknown=False):
    flags = sys.argv[1:] if flags is None else list(flags)
    fields = flat_fields(arguments, default)
    if "--help-all" in flags:
        flags = ["--help"]
    elif {"-h", "--help"} & {*flags} and len(fields) > FEW:
        print_short_help(arguments, fields)
        sys.exit(0)
    _check_words(flags, fields)
    registry = ConstructorRegistry() if registry is None else registry
    registry.struct_rule(_of_dataclass)
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


def _check_words(flags: Sequence[str], fields: Mapping[str, Field]) -> None:
    """Raises ConfigError for what no file or console can hold, and for the names that other libraries have."""
    for word in flags:
        if not word.isascii() and word.encode(errors="replace").decode() != word:
            raise ConfigError(f"{word!r} is no text in UTF-8; write it in UTF-8")
        name = word.partition("=")[0][2:].replace("-", "_") if word.startswith("--") else ""
        if name not in fields and (ours := OTHER_WORDS.get(name)) in fields:
            raise ConfigError(f"--{name.replace('_', '-')} is --{ours.replace('_', '-')} here")


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
        if isinstance(value, Path):
            if value == Path() and {"", f"{word}="} & given:
                raise ConfigError(f"{word} has an empty path; write . for the current folder")
            value = value.expanduser()
        limits.check(word, hints[name], value)
        values[name] = _construct(value, given) if isinstance(value, _Unmade) else value
    return unmade.func(**values)


def chosen(known: Mapping[str, T], names: Sequence[str], kind: str) -> dict[str, T]:
    """Those with one of the names, in this order, or all without names; raises ConfigError for an unknown name."""
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown {kind} {name!r}: {nearest(name, known)}")
    return {name: known[name] for name in names or known}

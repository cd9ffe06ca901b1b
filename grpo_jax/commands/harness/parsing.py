"""Dataclasses from the flags of a command line: help in groups, errors in one line."""

import ast
import contextlib
import dataclasses
import inspect
import io
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypedDict, TypeVar, get_type_hints

import tyro

from grpo_jax.commands.harness import limits
from grpo_jax.errors import ConfigError, nearest

T = TypeVar("T")

OPTIONS = "options"
COMMANDS = "grpo_jax.commands."
FIRST = ("environment", "algorithm", "total_steps", "num_seeds", "learning_rate", "out", "seed", "env_params")
"""The flags that people change first, which the help shows first."""
GROUPS = {
    "config.environment": OPTIONS,
    "config.num_envs": "rollout",
    "config.num_epochs": "update",
    "config.network": "policy",
    "layers.hidden_sizes": "policy",
    "transformer.num_layers": "transformer",
    "hyperparams.learning_rate": "hyperparameter",
    "config_file": OPTIONS,
    "mesh": "device",
    "checkpoint_every": "recording",
    "num_seeds": OPTIONS,
}
"""A group of the help begins with each of these fields, in the order of declaration."""


class Flag(NamedTuple):
    """A field of a dataclass, or of a dataclass in it, as a flag."""

    path: tuple[str, ...]  # names of the fields that lead to it
    annotation: Any
    default: Any
    group: str


def invocation(command: str | None = None) -> str:
    """How the user starts a command, or, without a name, the program that runs."""
    if command is None and not (module := getattr(sys.modules["__main__"].__spec__, "name", "")).startswith(COMMANDS):
        return f"python -m {module}"
    return f"grpo-jax {(command or module.rpartition('.')[2]).replace('_', '-')}"


def parse_flags(arguments: type[T], flags: Sequence[str] | None = None) -> T:
    """The dataclass of flags, by default those of the command line.

    Fields marked with `OmitArgPrefixes` are dataclasses whose own fields are flags.

    Raises:
      ConfigError: a flag is unknown, has a wrong value, or one beyond the limits of its type (`limits`).
    """
    return parse_known_flags(arguments, flags, allow_unknown=False)[0]


def parse_known_flags(
    arguments: type[T],
    flags: Sequence[str] | None = None,
    *,
    default: T | None = None,
    registry: tyro.constructors.ConstructorRegistry | None = None,
    complete: Callable[[dict[str, Any]], dict[str, Any]] = lambda values: values,
    allow_unknown: bool = True,
) -> tuple[T, list[str]]:
    """As `parse_flags`, and the flags that are unknown; `complete` changes the values of the flags by their names."""
    every = reversed(list(_list_flags(arguments, dataclasses.MISSING if default is None else default)))
    listed = list({flag.path[-1]: flag for flag in every}.values())[::-1]  # the first of a name that comes twice
    schema, defaults = _schema(listed)
    with one_line_errors():
        parsed = tyro.cli(
            schema,
            prog=invocation(),
            description=inspect.cleandoc(arguments.__doc__ or ""),
            args=flags,
            default=defaults,
            return_unknown_args=allow_unknown,
            config=(tyro.conf.OmitArgPrefixes,),
            registry=registry,
        )
    values, unknown = parsed if allow_unknown else (parsed, [])
    by_name = {}
    given = {word.replace("_", "-") for word in (sys.argv[1:] if flags is None else flags)}
    for flag in listed:
        name = flag.path[-1]
        by_name[name] = values[name] if flag.group == OPTIONS else values[flag.group][name]
        word = f"--{name.replace('_', '-')}"
        if by_name[name] in ((), {}) and word in given:
            raise ConfigError(f"{word} has no value; write one or several after it, or leave it out")
        limits.check(word, flag.annotation, by_name[name])
    return _construct(arguments, complete(by_name)), unknown


def chosen(known: Mapping[str, T], names: Sequence[str], kind: str) -> dict[str, T]:
    """Those with one of the names, in this order, or all without names; raises ConfigError for an unknown name."""
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown {kind} {name!r}: {nearest(name, known)}")
    return {name: known[name] for name in names or known}


def _list_flags(arguments: type, default: Any, path: tuple[str, ...] = (), group: str = OPTIONS) -> Iterator[Flag]:
    """The flags of a dataclass, with the values of a default, whose fields may be left out."""
    docs, hints = _field_docs(arguments), get_type_hints(arguments, include_extras=True)
    for field in dataclasses.fields(arguments):
        annotation, here = hints[field.name], (*path, field.name)
        made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        value = getattr(default, field.name, made)
        if _is_nested(annotation):
            yield from _list_flags(annotation.__origin__, value, here, group)
            continue
        group = GROUPS.get(".".join(here), group)
        if field.name in docs:
            annotation = Annotated[annotation, tyro.conf.arg(help=docs[field.name])]
        yield Flag(here, annotation, value, OPTIONS if field.name in FIRST else group)


def _is_nested(annotation: Any) -> bool:
    return tyro.conf.OmitArgPrefixes in getattr(annotation, "__metadata__", ())


def _field_docs(arguments: type) -> dict[str, str]:
    """The docstring of each field: the string below it."""
    docs = {}
    for base in reversed(arguments.__mro__[:-1]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        for node, below in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(node, ast.AnnAssign) and isinstance(below, ast.Expr):
                docs[node.target.id] = " ".join(ast.literal_eval(below.value).split())
    return docs


def _schema(flags: list[Flag]) -> tuple[Any, dict[str, Any]]:
    """A typed dictionary of the flags, with one in it for each group, and the defaults."""
    first = sorted((flag for flag in flags if flag.path[-1] in FIRST), key=lambda flag: FIRST.index(flag.path[-1]))
    others = [flag for flag in flags if flag not in first]
    schemas: dict[str, dict[str, Any]] = {OPTIONS: {}}
    defaults: dict[str, dict[str, Any]] = {OPTIONS: {}}
    for flag in first + others:
        schemas.setdefault(flag.group, {})[flag.path[-1]] = flag.annotation
        if flag.default is not dataclasses.MISSING:
            defaults.setdefault(flag.group, {})[flag.path[-1]] = flag.default
    groups = {name: TypedDict(name, fields) for name, fields in schemas.items() if name != OPTIONS}
    values = {name: defaults[name] for name in groups}
    return TypedDict(OPTIONS, schemas[OPTIONS] | groups), defaults[OPTIONS] | values


def _construct(arguments: type[T], values: dict[str, Any]) -> T:
    """The dataclass of the values of its flags."""
    hints = get_type_hints(arguments, include_extras=True)
    fields = {}
    for field in dataclasses.fields(arguments):
        hint = hints[field.name]
        fields[field.name] = _construct(hint.__origin__, values) if _is_nested(hint) else values[field.name]
    return arguments(**fields)


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
        raise ConfigError(f"{' '.join(message)}; {advice}") from None

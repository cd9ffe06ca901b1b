"""The help of a command with many flags: those that are used most, a line or two each."""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, get_args, get_type_hints

from rich.console import Console
from rich.table import Table

FEW = 15
"""Flags that are all shown."""
FIRST = ("environment", "algorithm", "total_steps", "num_seeds", "out", "num_envs", "learning_rate", "network")
LATER = ("scale", "group_size", "discount", "entropy_coef", "env_params", "seed", "config", "hyperparams")
LATER += ("evaluate_every", "checkpoint_every", "resume", "tensorboard", "wandb")
MOST_OWN = 12
LISTED = {name: f"; see grpo-jax list {name}s" for name in ("algorithm", "environment", "network")}


class Field(NamedTuple):
    """A flag."""

    words: str
    default: Any
    is_own: bool  # a field of the command's class itself, not of one that it has or is derived from


def invocation(command: str | None = None) -> str:
    """How the user starts a command; without a name, the program that runs."""
    module = getattr(sys.modules["__main__"].__spec__, "name", "")
    if command is None and module.startswith("experiments."):
        return f"python -m {module}"
    return f"grpo-jax {command or module.rpartition('.')[2]}".replace("_", "-").rstrip()


def field_words(arguments: type, name: str) -> str | None:
    """The help of a field: the string below it."""
    return _field_docs(arguments).get(name)


@functools.cache
def _field_docs(arguments: type) -> dict[str, str]:
    from docstring_parser import parse_from_object  # as tyro does

    parsed = (parse_from_object(base).params for base in reversed(arguments.__mro__[:-1]))
    return {field.arg_name: " ".join((field.description or "").split()) for fields in parsed for field in fields}


def flat_fields(arguments: type, default: Any = None) -> dict[str, Field]:
    """The flags of a dataclass and of the dataclasses in it, by their names."""
    return dict(reversed([*_fields(arguments, default, top=arguments)]))


def _fields(kind: type, default: Any, top: type) -> Iterator[tuple[str, Field]]:
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        value = getattr(default, field.name, value)
        inner = type(value) if dataclasses.is_dataclass(value) else hints[field.name]
        if dataclasses.is_dataclass(inner):
            yield from _fields(inner, value, top)
            continue
        options = [each for each in get_args(hints[field.name]) if type(each).__name__ == "_ArgConfig"]
        name = next((each.name for each in options if each.name), field.name)
        words = next((each.help for each in options if each.help), field_words(kind, field.name)) or ""
        yield name, Field(words, value, kind is top and field.name in vars(top)["__annotations__"])


def print_short_help(arguments: type, fields: Mapping[str, Field]) -> None:
    """Prints the flags that are needed, those used most, and those of this command alone."""
    own = [name for name in reversed(fields) if fields[name].is_own]
    needed = [name for name in own if fields[name].default is dataclasses.MISSING]
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for name in dict.fromkeys([*needed, *FIRST, *own[: len(needed) + MOST_OWN], *LATER]):
        if name in fields:
            words, default, _ = fields[name]
            words = words.partition(". ")[0].partition(" (or ")[0].rstrip(".") + LISTED.get(name, "")
            shown = "(needed)" if name in needed else "" if default in (None, ()) else f"[{default}]"
            table.add_row(f"  --{name.replace('_', '-')}", f"{words} {shown}".rstrip())
    console = Console(width=None if sys.stdout.isatty() else 80, markup=False, highlight=False)
    console.print(f"usage: {invocation()} [OPTIONS]\n\n{inspect.cleandoc(arguments.__doc__ or '')}\n")
    console.print(table)
    console.print(f"\nAll {len(fields)} flags: {invocation()} --help-all")

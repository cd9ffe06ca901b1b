"""Dataclasses from the flags of a command line, by tyro: values within their limits, and help of those used most."""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_type_hints

import tyro
from docstring_parser import parse_from_object
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from grpo_jax.commands.harness import limits
from grpo_jax.errors import OTHER_WORDS, ConfigError

T = TypeVar("T")

FEW = 15
"""Flags that --help shows all of; of more, those that are used most and the first of a command's own."""
MOST_OWN = 12
USED_MOST = (
    *("environment", "algorithm", "total_steps", "num_seeds", "out", "num_envs", "learning_rate", "network", "scale"),
    *("group_size", "discount", "entropy_coef", "env_params", "seed", "config_file"),
    *("evaluate_every", "checkpoint_every", "resume", "tensorboard", "wandb"),
)


class Words(NamedTuple):
    """What a class of flags, in its `WORDS`, says of them in place of their fields."""

    shown: Collection[str] = ()  # those of --help; by default `USED_MOST`, and the first of the class
    help: Mapping[str, dict[str, str]] = {}  # by name, arguments of `tyro.conf.arg`
    others: Mapping[str, str] = {}  # words of other libraries, and what they are here


def invocation(command: str | None = None) -> str:
    """How the user starts a command; without a name, the program that runs."""
    module = getattr(sys.modules["__main__"].__spec__, "name", "")
    if command is None and module.startswith("experiments."):
        return f"python -m {module}"
    return f"grpo-jax {command or module.rpartition('.')[2]}".replace("_", "-").rstrip()


def parse_flags(arguments: type[T], flags: Sequence[str] | None = None, **options: Any) -> T:
    """As `parse_known_flags`; a flag that is unknown ends the process with tyro's message."""
    return parse_known_flags(arguments, flags, allow_unknown=False, **options)[0]


def peek(arguments: type[T], flags: Sequence[str] | None = None) -> T:
    """The few flags on which the defaults of others depend, whatever else is on the command line."""
    return tyro.cli(arguments, args=flags, return_unknown_args=True, add_help=False)[0]


def parse_known_flags(
    arguments: type[T],
    flags: Sequence[str] | None = None,
    *,
    default: T | None = None,
    registry: ConstructorRegistry | None = None,
    complete: Callable[[dict[str, Any]], None] = lambda values: None,
    note: str = "",
    allow_unknown: bool = True,
) -> tuple[T, list[str]]:
    """The dataclass of flags, by default those of the command line, and the unknown flags.

    Fields of dataclasses in it are flags as well. `complete` may change its values before dataclasses are made of them;
    `note` is for the help. A value of another type ends the process with tyro's message; one beyond the limits of its
    type raises ConfigError.
    """
    flags = sys.argv[1:] if flags is None else list(flags)
    names, words = flag_names(arguments, default), getattr(arguments, "WORDS", Words())
    shown, description = None, "\n\n".join(filter(None, [inspect.cleandoc(arguments.__doc__ or ""), note]))
    if "--help-all" in flags:
        flags = ["--help"]
    elif {"-h", "--help"} & {*flags} and len(names) > FEW:
        shown = {*words.shown} or {*USED_MOST, *[*vars(arguments)["__annotations__"]][:MOST_OWN]}
        description += f"\n\nThe flags used most are below; all {len(names)}: {invocation()} --help-all. "
        description += "Names that flags take: grpo-jax list"
    _check_words(flags, names, words.others)
    registry = ConstructorRegistry() if registry is None else registry
    registry.struct_rule(functools.partial(_of_dataclass, shown, words.help))
    parsed = tyro.cli(
        arguments,
        prog=invocation(),
        description=description,
        args=flags,
        default=default,
        return_unknown_args=allow_unknown,
        config=(tyro.conf.OmitArgPrefixes,),
        registry=registry,
    )
    unmade, unknown = parsed if allow_unknown else (parsed, [])
    complete(unmade.keywords)
    return _construct(unmade, {word.replace("_", "-") for word in flags}), unknown


def flag_names(kind: type, default: Any = None) -> set[str]:
    """The names of the flags of a dataclass and of the dataclasses in it."""
    names, hints = set(), get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        value = getattr(default, field.name, None)
        inner = type(value) if dataclasses.is_dataclass(value) else hints[field.name]
        if dataclasses.is_dataclass(inner):
            names |= flag_names(inner, value)
        else:
            options = (each for each in get_args(hints[field.name]) if type(each).__name__ == "_ArgConfig")
            names.add(next((each.name for each in options if each.name), field.name))
    return names


def _check_words(flags: Sequence[str], names: Collection[str], others: Mapping[str, str]) -> None:
    """Raises ConfigError for what no file or console can hold, and for the names that other libraries have."""
    for word in flags:
        if not word.isascii() and word.encode(errors="replace").decode() != word:
            raise ConfigError(f"{word!r} is no text in UTF-8; write it in UTF-8")
        name = word.partition("=")[0][2:].replace("-", "_") if word.startswith("--") else ""
        ours = OTHER_WORDS.get(name)
        same = f"--{ours.replace('_', '-')}" if ours in names else None
        if name not in names and (answer := others.get(name, same)):
            raise ConfigError(f"--{name.replace('_', '-')} is {answer} here")


class _Unmade(functools.partial):
    """A dataclass whose constructor is called after the flags are parsed, so that its errors remain its own."""


def _of_dataclass(shown: Collection[str] | None, own: Mapping, info: StructTypeInfo) -> StructConstructorSpec | None:
    """The rule by which tyro takes a dataclass apart; fields that a default lacks have those of their class.

    With `shown`, the help leaves out the others that have a default.
    """
    if not dataclasses.is_dataclass(info.type):
        return None

    def unmade(**values):
        return _Unmade(info.type, **values)

    unmade.__doc__ = "" if shown else (info.type.__doc__ or "").partition("\n")[0]
    hints, words, fields = get_type_hints(info.type, include_extras=True), _field_words(info.type), []
    for field in dataclasses.fields(info.type):
        made = tyro.MISSING if field.default is dataclasses.MISSING else field.default
        made = made if field.default_factory is dataclasses.MISSING else field.default_factory()
        hint, default = hints[field.name], getattr(info.default, field.name, made)
        hint = Annotated[hint, tyro.conf.arg(**own[field.name])] if field.name in own else hint
        if shown is not None and field.name not in shown and default is not tyro.MISSING:
            hint = hint if dataclasses.is_dataclass(hint) else Annotated[hint, tyro.conf.Suppress]
        fields.append(StructFieldSpec(field.name, hint, default, words.get(field.name)))
    return StructConstructorSpec(unmade, tuple(fields))


@functools.cache
def _field_words(kind: type) -> dict[str, str]:
    """The help of each field: the string below it."""
    parsed = (parse_from_object(base).params for base in reversed(kind.__mro__[:-1]))
    return {field.arg_name: " ".join((field.description or "").split()) for fields in parsed for field in fields}


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

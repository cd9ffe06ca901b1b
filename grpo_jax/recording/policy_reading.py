"""Host: the parts of a trained policy, as they are read from its files."""

import functools
import keyword
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from grpo_jax.config import Config
from grpo_jax.environments import row_parameters
from grpo_jax.errors import ConfigError
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.importing import import_object, import_path
from grpo_jax.recording.config_file import FIELDS, from_json
from grpo_jax.recording.json_fields import as_numbers
from grpo_jax.recording.policy_files import DESCRIPTION, Arrays
from grpo_jax.types import PyTree, by_path

_HYPERPARAMS = "hyperparams"


def read_config(path: Path, description: Mapping[str, Any], *, trust: bool) -> Config:
    """The config in a policy.json.

    Raises:
      ConfigError: the file cannot express it, or names what is not trusted, or the config cannot be made.
    """
    if missing := description["not_in_config"]:
        raise ConfigError(
            f"{path} cannot express {', '.join(missing)}, as it is an object or a function without an import path; "
            "give the run's config: load(folder, config=my_config)"
        )
    fields = from_json(path, description["config"], FIELDS, "Config", trust=trust)
    try:
        return Config(**fields)
    except Exception as error:  # of functions that the file names, too
        raise ConfigError(f"{path}: the config cannot be made: {error}") from error


def read_env_params(path: Path, description: Mapping[str, Any], config: Config) -> dict[str, jax.Array]:
    """The parameters of the environment that the run gave to each row."""
    try:
        env_params = {name: as_numbers(value) for name, value in (description["env_params"] or {}).items()}
        return row_parameters(config.env, env_params, description["num_rows"])
    except (ConfigError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path}: env_params are damaged: {error}") from error


def hyperparams_class(description: Mapping[str, Any], arrays: Arrays, *, trust: bool) -> type[Hyperparams]:
    """The class of the hyperparameters.

    That of the run, if this process has it or `trust` allows to import it. Otherwise a class with the same fields,
    since hyperparameters are numbers.

    Raises:
      ConfigError: what was imported is no such class, or a field has no name that it could have.
    """
    path = description[_HYPERPARAMS]
    if trust and path is not None:
        found = import_object(path, _HYPERPARAMS)
        if not (isinstance(found, type) and issubclass(found, Hyperparams)):
            raise ConfigError(f"hyperparams is {path!r}, but must be a class derived from Hyperparams")
        return found
    for known in _subclasses(Hyperparams):
        if path is not None and import_path(known) == path:
            return known
    names = [name.removeprefix(f"{_HYPERPARAMS}/") for name in arrays if name.startswith(f"{_HYPERPARAMS}/")]
    return _class_with(tuple(name for name in names if name not in Hyperparams.__dataclass_fields__))


def _subclasses(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        if "__dataclass_fields__" in vars(each):
            yield each
        yield from _subclasses(each)


@functools.cache
def _class_with(names: Sequence[str]) -> type[Hyperparams]:
    """A class of hyperparameters with fields of these names as well."""
    if not names:
        return Hyperparams
    for name in names:
        if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_") or hasattr(Hyperparams, name):
            raise ConfigError(f"{_HYPERPARAMS}/{name} is no name of a hyperparameter; the file is damaged")
    members = {"__annotations__": dict.fromkeys(names, float), **dict.fromkeys(names, 0.0)}
    return struct.dataclass(type("OwnHyperparams", (Hyperparams,), members))


def as_hyperparams(kind: type[Hyperparams], arrays: Arrays) -> Hyperparams:
    """The hyperparameters in the arrays of a file; a field that is newer than the file has its default."""
    num_rows = len(arrays["score"])
    saved = {name: arrays.get(f"{_HYPERPARAMS}/{name}") for name in kind.__dataclass_fields__}
    return kind(**{name: jnp.asarray(value) for name, value in saved.items() if value is not None}).broadcast(num_rows)


def check_arrays(expected: Mapping[str, Any], arrays: Arrays, num_rows: int, file: Path) -> None:
    """Checks the names, shapes and kinds of all arrays of a file.

    Args:
      expected: the array of one row by path; hyperparameters may be missing in the file: they are newer, or None.
      arrays: of the file.
      num_rows: of the policy.json beside it.
      file: for errors.

    Raises:
      ConfigError: with the first array that is missing, or is not as expected.
    """
    for path in {**expected, **arrays}:
        if path not in arrays and path.startswith(f"{_HYPERPARAMS}/"):
            continue
        if path in arrays and arrays[path].shape[:1] != (num_rows,):
            raise ConfigError(
                f"{path} has the shape {list(arrays[path].shape)} in {file}, but num_rows is {num_rows} in the "
                f"{DESCRIPTION} beside it: one of the two files is damaged, or that of another run"
            )
        here = _describe(expected[path].shape, expected[path].dtype) if path in expected else "missing"
        there = _describe(arrays[path].shape[1:], arrays[path].dtype) if path in arrays else "missing"
        if here != there:
            raise ConfigError(
                f"{path} is {there} in {file}, but {here} in the config's policy: the code has changed since, or "
                "config= is that of another run"
            )


def expected_arrays(trees: Mapping[str, PyTree], kind: type[Hyperparams]) -> dict[str, Any]:
    """For `check_arrays`: the leaves of trees by the first part of their paths, the hyperparameters, and the scores."""
    number, count = jax.ShapeDtypeStruct((), np.float32), jax.ShapeDtypeStruct((), np.int32)
    expected = {path: leaf for prefix, tree in trees.items() for path, leaf in by_path(tree, prefix).items()}
    expected |= {f"{_HYPERPARAMS}/{name}": number for name in kind.__dataclass_fields__}
    return expected | {"score": number, "steps": count}


def _describe(shape: Sequence[int], dtype: Any) -> str:
    """A shape, and the kind of numbers unless they are real; their precision may be another."""
    kinds = {np.floating: "", np.integer: " of integers"}
    return f"{list(shape)}{next((word for kind, word in kinds.items() if jnp.issubdtype(dtype, kind)), f' of {dtype}')}"


def as_tree(like: PyTree, prefix: str, arrays: Arrays) -> PyTree:
    """The arrays whose paths begin with the prefix, in the structure of `like`, each with a leading axis of rows."""
    return jax.tree.unflatten(jax.tree.structure(like), [jnp.asarray(arrays[path]) for path in by_path(like, prefix)])

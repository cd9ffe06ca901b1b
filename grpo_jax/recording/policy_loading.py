"""Host: trained policies are read from the folder of a run."""

import functools
import keyword
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from grpo_jax.config import Config
from grpo_jax.environments import row_parameters
from grpo_jax.errors import ConfigError
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.importing import import_object
from grpo_jax.recording.config_file import FIELDS, from_json
from grpo_jax.recording.files import Arrays, as_numbers, as_path, read_archive
from grpo_jax.recording.metrics_file import as_setting
from grpo_jax.recording.policy_saver import KINDS, find_run
from grpo_jax.recording.trained_policy import TrainedPolicy
from grpo_jax.training.train import make_init
from grpo_jax.types import PyTree, by_path


def load(
    folder: str | Path,
    run: str | None = None,
    *,
    which: Literal["final", "best"] = "final",
    row: int | Literal["best", "all"] = "best",
    config: Config | None = None,
    trust: bool = False,
) -> TrainedPolicy:
    """A trained policy from the folder of a run.

    ```python
    policy = grpo_jax.load("runs/mine")
    actions = policy.act(observations)
    ```

    Args:
      folder: of the results, such as `--out` of a command.
      run: its name, such as "PPO on CartPole-v1" or "PPO"; needed if the folder holds several runs. Of a
        sweep, None is the best setting.
      which: "final", after all training, or "best", when the score was highest.
      row: number of the seed, or of the seed × hyperparameters; "best" is the seed with the highest score, where rows
        differ in their settings among those of the setting with the highest mean score; "all" gives all rows, as
        `run(params=...)` takes them.
      config: of the run, where its file cannot express it: with functions that have no import path, such as a
        lambda, or an environment that is an object.
      trust: import what the folder names: environments, networks and other functions that are not of this package.
        Importing runs code, so do this only if you trust who made the folder.

    Raises:
      ConfigError: there is no such folder, run, file or row, a file is damaged or of a newer format, the parameters
        do not fit the config, or the folder names something that is not trusted.
    """
    if which not in ("final", "best"):
        raise ConfigError(f"which={which!r} is unknown; use 'final' or 'best'")
    file = find_run(as_path(folder), run, which)
    description, arrays = read_archive(file, KINDS)
    if config is None:
        config = _read_config(file, description, trust=trust)
    num_rows, kind = description["num_rows"], _hyperparams_class(description, arrays, trust=trust)
    policies = TrainedPolicy(
        name=as_setting(description).title,
        config=config,
        **_as_trees(config, kind, arrays, num_rows, file),
        env_params=_read_env_params(file, description, config),
        row=np.arange(num_rows),
    )
    if row == "all":
        return policies
    if row == "best":
        row = policies.settings.best_row(arrays["score"])
    if not isinstance(row, int | np.integer) or not 0 <= row < num_rows:
        raise ConfigError(f"row={row!r}, but {file} holds the rows 0 to {num_rows - 1}; use one, 'best' or 'all'")
    return policies[row]


def _read_config(path: Path, description: Mapping[str, Any], *, trust: bool) -> Config:
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


def _read_env_params(path: Path, description: Mapping[str, Any], config: Config) -> dict[str, jax.Array]:
    """The parameters of the environment that the run gave to each row."""
    try:
        env_params = {name: as_numbers(value) for name, value in (description["env_params"] or {}).items()}
        return row_parameters(config.env, env_params, description["num_rows"])
    except (ConfigError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path}: env_params are damaged: {error}") from error


def _hyperparams_class(description: Mapping[str, Any], arrays: Arrays, *, trust: bool) -> type[Hyperparams]:
    """The run's class, if `trust` allows its import; otherwise one with the same fields."""
    path = description["hyperparams"]
    if trust and path is not None:
        found = import_object(path, "hyperparams")
        if not (isinstance(found, type) and issubclass(found, Hyperparams)):
            raise ConfigError(f"hyperparams is {path!r}, but must be a class derived from Hyperparams")
        return found
    names = [name.removeprefix("hyperparams/") for name in arrays if name.startswith("hyperparams/")]
    return _class_with(tuple(name for name in names if name not in Hyperparams.__dataclass_fields__))


@functools.cache
def _class_with(names: Sequence[str]) -> type[Hyperparams]:
    """A class of hyperparameters with fields of these names as well."""
    if not names:
        return Hyperparams
    for name in names:
        if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_") or hasattr(Hyperparams, name):
            raise ConfigError(f"hyperparams/{name} is not a hyperparameter; the file is damaged")
    members = {"__annotations__": dict.fromkeys(names, float), **dict.fromkeys(names, 0.0)}
    return struct.dataclass(type("OwnHyperparams", (Hyperparams,), members))


def _as_trees(config: Config, kind: type[Hyperparams], arrays: Arrays, num_rows: int, file: Path) -> dict[str, PyTree]:
    """The arrays of a file in the structures of a policy; ConfigError with the first that does not fit."""
    number, count = jax.ShapeDtypeStruct((), np.float32), jax.ShapeDtypeStruct((), np.int32)
    state = jax.eval_shape(make_init(config), jax.random.key(0), kind())
    # A hyperparameter that is newer than the file has its default.
    saved = {name: number for name in kind.__dataclass_fields__ if f"hyperparams/{name}" in arrays}
    like = {"params": state.params, "normalizer": state.normalizer, "hyperparams": saved, "score": number}
    expected = by_path(like) | {"steps": count}
    for path in {**expected, **arrays}:
        if path in arrays and arrays[path].shape[:1] != (num_rows,):
            raise ConfigError(
                f"{path} has the shape {list(arrays[path].shape)} in {file}, but num_rows is {num_rows}: it is damaged"
            )
        here = _describe(expected[path].shape, expected[path].dtype) if path in expected else "missing"
        there = _describe(arrays[path].shape[1:], arrays[path].dtype) if path in arrays else "missing"
        if here != there:
            raise ConfigError(
                f"{path} is {there} in {file}, but {here} in the config's policy: the code has changed since, or "
                "config= belongs to another run"
            )
    trees = jax.tree.unflatten(jax.tree.structure(like), [jnp.asarray(arrays[path]) for path in by_path(like)])
    hyperparams = kind(**trees["hyperparams"]).broadcast(num_rows)
    return trees | {"hyperparams": hyperparams, "score": arrays["score"], "steps": arrays["steps"]}


def _describe(shape: Sequence[int], dtype: Any) -> str:
    """A shape, and the kind of numbers unless they are real; their precision may be another."""
    kinds = {np.floating: "", np.integer: " of integers"}
    return f"{list(shape)}{next((word for kind, word in kinds.items() if jnp.issubdtype(dtype, kind)), f' of {dtype}')}"

"""Host: the files of trained policies.

OUT/policies/<run>/policy.json         config, versions, format
OUT/policies/<run>/final.safetensors   arrays by path, such as params/actor/Dense_0/kernel, with rows first
OUT/policies/<run>/best.safetensors
"""

import json
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.errors import ConfigError, nearest
from grpo_jax.importing import import_path
from grpo_jax.recording.config_file import config_fields
from grpo_jax.recording.files import replacement, write_json
from grpo_jax.recording.json_fields import check_fields, read_object, with_checksum
from grpo_jax.recording.plan import Plan, as_lists, versions
from grpo_jax.types import by_path

FOLDER, DESCRIPTION = "policies", "policy.json"
FORMAT = 1
"""Of the files; a reader refuses a newer one."""

NUM_EPISODES = 100
"""The fewest training episodes that a score is a mean of, once as many have ended."""

_FIELDS = {
    **{"format": int, "name": str, "label": str, "environment": str, "num_rows": int, "config": dict[str, Any]},
    **{"not_in_config": list[str], "hyperparams": str | None, "env_params": dict[str, Any] | None, "score": str},
    "versions": dict[str, str],
}
"""Of policy.json."""

_HEADER = "grpo_jax"  # the only entry of a file's metadata: safetensors does not keep the order of several

Arrays = dict[str, np.ndarray]


def policy_folder(directory: Path, plan: Plan) -> Path:
    """The folder of a run's policies in the folder of its results."""
    return directory / FOLDER / plan.folder


def describe_policy(plan: Plan) -> dict[str, Any]:
    """The contents of policy.json."""
    config, missing = config_fields(plan.config)
    return {
        "format": FORMAT,
        "name": plan.name,
        "label": plan.label,
        "environment": plan.config.env.name,
        "num_rows": len(plan.keys),
        "config": config,
        "not_in_config": missing,
        "hyperparams": import_path(type(plan.hyperparams)),
        "env_params": None if plan.env_params is None else as_lists(plan.env_params),
        "score": f"mean return of an evaluation, or else of the last {NUM_EPISODES} or more training episodes",
        "versions": versions(),
    }


def write_policies(folder: Path, description: Mapping[str, Any], arrays: Mapping[str, Arrays]) -> None:
    """Writes policy.json and a file of arrays for each of "final" and "best"; each file is replaced as a whole."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / DESCRIPTION, with_checksum(description))
    for which, leaves in arrays.items():
        leaves = {path: np.ascontiguousarray(leaf) for path, leaf in leaves.items()}
        header = {"format": FORMAT, "checksums": {path: _checksum(leaf) for path, leaf in leaves.items()}}
        write_arrays(
            folder / f"{which}.safetensors", leaves, {_HEADER: json.dumps(header)}, mode_of=folder / DESCRIPTION
        )


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str], *, mode_of: Path) -> None:
    """Writes a file of safetensors atomically.

    Args:
      path: of the file.
      arrays: by name.
      metadata: texts by name.
      mode_of: the file with the permissions that the new one gets; safetensors lets only the owner read it.

    Raises:
      OSError: the file cannot be written, for example to a full disk.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    with replacement(path) as temporary:
        try:
            save_file(dict(arrays), temporary, metadata=dict(metadata))
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from error
        shutil.copymode(mode_of, temporary)


def read_arrays(path: Path) -> Arrays:
    """The arrays in a file, by their paths.

    Raises:
      ConfigError: there is no such file, or it is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads((file.metadata() or {}).get(_HEADER, "{}"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dictionary
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    checksums = header.get("checksums") if type(header) is dict else None
    if type(checksums) is not dict:
        raise ConfigError(f"{path} does not hold policies of grpo_jax")
    for name in {**checksums, **arrays}:
        if name not in arrays or _checksum(arrays[name]) != checksums.get(name):
            raise ConfigError(f"{path} is damaged: {name} has changed since it was written")
    return arrays


def find_run(folder: Path, run: str | None = None) -> tuple[Path, dict[str, Any]]:
    """The folder of a run's policies, and the contents of its policy.json.

    Raises:
      ConfigError: there is no such folder or run, or there are several and `run` is None.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; name that of a run, such as runs/mine")
    paths = [path for path in (folder, *sorted((folder / FOLDER).glob("*"))) if (path / DESCRIPTION).exists()]
    if not paths:
        raise ConfigError(
            f"{folder} has no trained policies ({FOLDER}/*/{DESCRIPTION}); they are written at a run's end"
        )
    found = [(path, _read_description(path / DESCRIPTION)) for path in paths]
    if run is not None:
        named = [each for each in found if run in (each[1]["name"], each[1]["label"], each[0].name)]
        if not named:
            names = [description["name"] for _, description in found]
            raise ConfigError(f"{folder} has no run {run!r}: {nearest(run, names)}")
        found = named
    if len(found) > 1:
        names = ", ".join(repr(description["name"]) for _, description in found)
        raise ConfigError(f"{folder} holds several runs: {names}; choose one by its name (run=..., --run)")
    return found[0]


def _read_description(path: Path) -> dict[str, Any]:
    description = read_object(path)
    version = description.get("format")
    if type(version) is not int or version < 1:
        raise ConfigError(f"{path} is damaged: format is {version!r}, but must be a whole number of at least 1")
    if version > FORMAT:
        versions = description.get("versions")
        made_with = versions.get("grpo-jax") if isinstance(versions, dict) else None
        raise ConfigError(
            f"{path} has format {version}, written by grpo-jax {made_with}, but this version reads up to {FORMAT}; "
            "install a newer grpo-jax"
        )
    check_fields(path, description, _FIELDS, optional=("environment", "score", "versions"))
    return description


def policy_arrays(policy: Any) -> dict[str, Any]:
    """The arrays that a policy consists of, by path; they are fields of a `TrainState` and of a `TrainedPolicy`."""
    parts = {"params": policy.params, "normalizer": policy.normalizer, "hyperparams": policy.hyperparams}
    return {path: leaf for prefix, tree in parts.items() for path, leaf in by_path(tree, prefix).items()}


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))

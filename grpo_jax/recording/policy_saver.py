"""Host: the latest policy of each row of a run, and its file.

OUT/policies/<run>/final.npz   arrays by path, such as params/actor/Dense_0/kernel, with rows first; config, versions
"""

from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.errors import ConfigError, nearest
from grpo_jax.recording.config_file import config_fields
from grpo_jax.recording.files import Arrays, plain, read_archive, read_as, write_archive
from grpo_jax.recording.metrics_file import VALUES, as_setting
from grpo_jax.recording.run_folder import SUMMARY_FILE
from grpo_jax.runs.processes import is_process_zero, whole_array
from grpo_jax.runs.run_spec import RunSpec, versions
from grpo_jax.types import TrainState, by_path

FOLDER, FILE = "policies", "final.npz"

KINDS = {
    **{"environment": str, "values": VALUES, "num_rows": int, "config": dict[str, Any]},
    **{"not_in_config": list[str], "env_params": dict[str, Any] | None, "versions": dict[str, str]},
}
"""The types of the fields beside the arrays."""


def write_policies(directory: Path, spec: RunSpec, arrays: Arrays) -> None:
    """Writes the file, which is replaced as a whole."""
    config, missing = config_fields(spec.config)
    description = {
        **vars(spec.setting),
        "num_rows": len(spec.keys),
        "config": config,
        "not_in_config": missing,
        "env_params": spec.env_params,
        "versions": versions(),
    }
    write_archive(policy_file(directory, spec), description, arrays)


def policy_file(directory: Path, spec: RunSpec) -> Path:
    """Where the policies of a run are."""
    return directory / FOLDER / spec.setting.folder / FILE


def find_run(folder: Path, run: str | None = None) -> Path:
    """The file of a run's policies; of a sweep, of those of the best setting.

    Raises:
      ConfigError: there is no such folder, run or file, or there are several runs and `run` is None.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; name a run's, such as runs/mine")
    folders = folder, *sorted((folder / FOLDER).glob("*"))
    files = [path / FILE for path in folders if (path / FILE).exists()]
    found = {path: as_setting(read_archive(path, KINDS, only_fields=True)[0]) for path in files}
    if not found:
        raise ConfigError(
            f"{folder} has no trained policies ({FOLDER}/*/{FILE}); they are written with checkpoints and at a run's "
            "end, for language models with --policies"
        )
    if run is not None:
        named = {path: each for path, each in found.items() if run in (each.title, str(each), path.parent.name)}
        if not named:
            raise ConfigError(f"{folder} has no run {run!r}: {nearest(run, [each.title for each in found.values()])}")
        found = named
    if len(found) > 1 and (folder / SUMMARY_FILE).exists():  # of a sweep: the best setting
        best = read_as(folder / SUMMARY_FILE, dict[str, Any]).get("best")
        found = {path: each for path, each in found.items() if plain(each.values) == best} or found
    if len(found) > 1:
        names = ", ".join(repr(each.title) for each in found.values())
        raise ConfigError(f"{folder} holds several runs: {names}; choose one by its name (run=..., --run)")
    (path,) = found
    return path


def policy_arrays(policy: Any) -> dict[str, Any]:
    """The arrays that a policy consists of, by path; they are fields of a `TrainState` and of a `TrainedPolicy`."""
    return by_path({"params": policy.params, "normalizer": policy.normalizer, "hyperparams": policy.hyperparams})


def save_policies(directory: Path, spec: RunSpec, states: TrainState, steps: np.ndarray, scores: np.ndarray) -> None:
    """Writes the policies of the states, with the steps and scores `[R]` of their rows.

    All processes of a run make the same call; process 0 alone writes.
    """
    # Without padding rows.
    arrays = {path: whole_array(leaf)[: len(steps)] for path, leaf in policy_arrays(states).items()}
    arrays |= {"score": np.array(scores, np.float64), "steps": np.array(steps, np.int64)}
    if is_process_zero():
        write_policies(directory, spec, arrays)

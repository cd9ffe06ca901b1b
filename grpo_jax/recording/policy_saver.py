"""Host: the latest and the best policy of each row of a run, and their files.

OUT/policies/<run>/final.npz   arrays by path, such as params/actor/Dense_0/kernel, with rows first; config, versions
OUT/policies/<run>/best.npz
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.errors import ConfigError, nearest
from grpo_jax.recording.config_file import config_fields
from grpo_jax.recording.files import Arrays, plain, read_archive, read_json, write_archive
from grpo_jax.recording.metrics_file import VALUES, as_setting
from grpo_jax.recording.run_folder import SUMMARY_FILE
from grpo_jax.runs.processes import from_process_zero, is_process_zero, whole_array
from grpo_jax.runs.run_spec import RunSpec, versions
from grpo_jax.types import TrainState, by_path

FOLDER = "policies"

KINDS = {
    **{"environment": str, "values": VALUES, "num_rows": int, "config": dict[str, Any]},
    **{"not_in_config": list[str], "env_params": dict[str, Any] | None, "versions": dict[str, str]},
}
"""The types of the fields beside the arrays."""


def write_policies(directory: Path, spec: RunSpec, arrays: Mapping[str, Arrays]) -> None:
    """Writes a file for each of "final" and "best", which is replaced as a whole."""
    config, missing = config_fields(spec.config)
    description = {
        **vars(spec.setting),
        "num_rows": len(spec.keys),
        "config": config,
        "not_in_config": missing,
        "env_params": spec.env_params,
        "versions": versions(),
    }
    for which, leaves in arrays.items():
        write_archive(policy_file(directory, spec, which), description, leaves)


def policy_file(directory: Path, spec: RunSpec, which: str = "final") -> Path:
    """Where the policies of a run are, "final" or "best"."""
    return directory / FOLDER / spec.setting.folder / f"{which}.npz"


def find_run(folder: Path, run: str | None = None) -> Path:
    """The file of a run's policies; of a sweep, of those of the best setting.

    Raises:
      ConfigError: there is no such folder, run or file, or there are several runs and `run` is None.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; name a run's, such as runs/mine")
    folders = folder, *sorted((folder / FOLDER).glob("*"))
    files = (path / "final.npz" for path in folders)
    found = {path: as_setting(read_archive(path, KINDS, only_fields=True)[0]) for path in files if path.exists()}
    if not found:
        raise ConfigError(
            f"{folder} has no trained policies ({FOLDER}/*/final.npz); they are written with checkpoints and at the "
            "end of a run, for language models with --policies"
        )
    if run is not None:
        named = {path: each for path, each in found.items() if run in (each.title, str(each), path.parent.name)}
        if not named:
            raise ConfigError(f"{folder} has no run {run!r}: {nearest(run, [each.title for each in found.values()])}")
        found = named
    if len(found) > 1 and (folder / SUMMARY_FILE).exists():  # of a sweep: the best setting
        best = read_json(folder / SUMMARY_FILE).get("best")
        found = {path: each for path, each in found.items() if plain(each.values) == best} or found
    if len(found) > 1:
        names = ", ".join(repr(each.title) for each in found.values())
        raise ConfigError(f"{folder} holds several runs: {names}; choose one by its name (run=..., --run)")
    (path,) = found
    return path


def policy_arrays(policy: Any) -> dict[str, Any]:
    """The arrays that a policy consists of, by path; they are fields of a `TrainState` and of a `TrainedPolicy`."""
    return by_path({"params": policy.params, "normalizer": policy.normalizer, "hyperparams": policy.hyperparams})


class PolicySaver:
    """Keeps the best policy of each row of a run on the host, and writes the latest and the best ones to a folder.

    All processes of a run make the same calls; process 0 alone writes. With `resume`, the best policies in the folder
    are those of this run so far.
    """

    def __init__(self, directory: Path, spec: RunSpec, *, resume: bool = False):
        self._directory, self._spec = directory, spec
        path = policy_file(directory, spec, "best")
        is_kept = resume and from_process_zero(path.exists)
        self._best = from_process_zero(lambda: read_archive(path, KINDS)[1]) if is_kept else None

    @property
    def _best_scores(self) -> np.ndarray:
        return np.full(len(self._spec.keys), np.nan) if self._best is None else self._best["score"]

    def update(self, states: TrainState, steps: np.ndarray, scores: np.ndarray) -> None:
        """Keeps the policies of the rows whose score `[R]` is higher than any before; none of a row with NaN."""
        improved = scores > np.nan_to_num(self._best_scores, nan=-np.inf)  # False for NaN
        if improved.any():
            self._keep(_to_host(states, steps, scores), improved)

    def save(self, states: TrainState, steps: np.ndarray, scores: np.ndarray) -> None:
        """Writes these policies as the latest, and the best: of rows without a score, the latest too."""
        latest, best = _to_host(states, steps, scores), self._best_scores
        self._keep(latest, np.isnan(best) | (scores > best))
        if is_process_zero():
            write_policies(self._directory, self._spec, {"final": latest, "best": self._best})

    def _keep(self, arrays: Arrays, rows: np.ndarray) -> None:
        """Keeps these rows of the arrays, bool `[R]`, as the best policies; all rows, if there are none before."""
        self._best = self._best or arrays
        for path, leaf in arrays.items():
            self._best[path][rows] = leaf[rows]


def _to_host(states: TrainState, steps: np.ndarray, scores: np.ndarray) -> Arrays:
    """Copies, without padding rows."""
    arrays = {path: whole_array(leaf)[: len(steps)] for path, leaf in policy_arrays(states).items()}
    return arrays | {"score": np.array(scores, np.float64), "steps": np.array(steps, np.int64)}

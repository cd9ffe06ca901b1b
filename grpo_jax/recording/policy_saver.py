"""Host: the final and the best policy of each row, which are kept while a run goes on, and their files.

OUT/policies/<run>/final.npz   arrays by path, such as params/actor/Dense_0/kernel, with rows first; config, versions
OUT/policies/<run>/best.npz
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.errors import ConfigError, nearest
from grpo_jax.recording.config_file import config_fields
from grpo_jax.recording.files import Arrays, plain, read_archive, read_as, write_archive
from grpo_jax.recording.metrics_file import VALUES, as_setting
from grpo_jax.recording.run_folder import SUMMARY_FILE
from grpo_jax.runs.processes import from_process_zero, is_process_zero, whole_array
from grpo_jax.runs.progress import Chunk, Progress
from grpo_jax.runs.result import last_episodes
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


def policy_file(directory: Path, spec: RunSpec, which: str) -> Path:
    """Where the policies of a run are, "final" or "best"."""
    return directory / FOLDER / spec.setting.folder / f"{which}.npz"


def find_run(folder: Path, run: str | None = None, which: str = "final") -> Path:
    """The file of a run's policies; of a sweep, of those of the best setting.

    Raises:
      ConfigError: there is no such folder, run or file, or there are several runs and `run` is None.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; name a run's, such as runs/mine")
    folders = folder, *sorted((folder / FOLDER).glob("*"))
    files = [path / f"{name}.npz" for path in folders for name in ("best", "final")]
    found = {path.parent: as_setting(read_archive(path, KINDS, only_fields=True)[0]) for path in files if path.exists()}
    if not found:
        raise ConfigError(
            f"{folder} has no trained policies ({FOLDER}/*/final.npz); they are written at a run's end, for language "
            "models with --policies"
        )
    if run is not None:
        named = {path: each for path, each in found.items() if run in (each.title, str(each), path.name)}
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
    if which == "final" and not (path / "final.npz").exists():
        raise ConfigError(f"{path} has no final policies, as the run did not end; use which='best' (--which best)")
    return path / f"{which}.npz"


def policy_arrays(policy: Any) -> dict[str, Any]:
    """The arrays that a policy consists of, by path; they are fields of a `TrainState` and of a `TrainedPolicy`."""
    return by_path({"params": policy.params, "normalizer": policy.normalizer, "hyperparams": policy.hyperparams})


class RecentReturns:
    """`scores`, `[R]`: the mean return of the last 100 or more training episodes of each row; NaN if none ended."""

    def __init__(self, num_rows: int, past: Chunk | None = None):
        self._returns, self._counts = np.zeros((2, 0, num_rows))
        self.scores = np.full(num_rows, np.nan)
        if past is not None and "episode/count" in past.metrics:
            self.add(past)

    def add(self, chunk: Chunk) -> None:
        """Adds the episodes of the next iterations."""
        added = (chunk.metrics[f"episode/{name}"] for name in ("return_mean", "count"))
        returns, counts = map(np.concatenate, zip((self._returns, self._counts), added, strict=True))
        self.scores, counts = last_episodes(returns, counts)
        kept = counts.any(axis=1)
        self._returns, self._counts = returns[kept], counts[kept]


class PolicySaver:
    """Keeps the best policy of each row of a run on the host, and writes it and the final one to a folder.

    All processes of a run make the same calls; process 0 alone writes. With `resume`, the best policies in the folder
    are those of this run so far.
    """

    def __init__(self, directory: Path, spec: RunSpec, *, resume: bool = False):
        self._directory, self._spec = directory, spec
        path = policy_file(directory, spec, "best")
        is_kept = resume and from_process_zero(path.exists)  # it is missing if no score was known
        self._best = from_process_zero(lambda: read_archive(path, KINDS)[1]) if is_kept else None
        self._changed = False

    def __enter__(self) -> "PolicySaver":
        return self

    def __exit__(self, exception_type, exception, traceback) -> None:
        # The disk may be full: that is reported already.
        with contextlib.suppress(*([OSError] if exception_type else [])):
            self.save()

    def update(self, progress: Progress, scores: np.ndarray) -> None:
        """Keeps the policies of the rows whose score `[R]` is higher than any before; none of a row with NaN."""
        improved = scores > np.nan_to_num(self._best_scores, nan=-np.inf)  # False for NaN
        if improved.any():
            self._keep(_to_host(progress.states, progress.steps, scores), improved)

    @property
    def _best_scores(self) -> np.ndarray:
        return np.full(len(self._spec.keys), np.nan) if self._best is None else self._best["score"]

    def _keep(self, arrays: Arrays, rows: np.ndarray) -> None:
        """Keeps these rows of the arrays, bool `[R]`, as the best policies; all rows, if there are none before."""
        self._best = self._best or arrays
        for path, leaf in arrays.items():
            self._best[path][rows] = leaf[rows]
        self._changed = True

    def save(self) -> None:
        """Writes the best policies, if there are better ones than before."""
        if self._changed and is_process_zero():
            write_policies(self._directory, self._spec, {"best": self._best})
        self._changed = False

    def finish(self, states: TrainState, steps: np.ndarray, scores: np.ndarray) -> None:
        """Writes the final policies, with their scores `[R]`. Rows without a better or any score keep them as best."""
        final, best = _to_host(states, steps, scores), self._best_scores
        improved = np.isnan(best) | (scores > best)
        if improved.any():
            self._keep(final, improved)
        if is_process_zero():
            write_policies(self._directory, self._spec, {"final": final})
        self.save()


def _to_host(states: TrainState, steps: np.ndarray, scores: np.ndarray) -> Arrays:
    """Copies, without padding rows."""
    arrays = {path: whole_array(leaf)[: len(steps)] for path, leaf in policy_arrays(states).items()}
    return arrays | {"score": np.array(scores, np.float64), "steps": np.array(steps, np.int64)}

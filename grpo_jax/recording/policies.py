"""Host: the final and the best policy of each row are kept while a run goes on."""

import contextlib
import logging
import shutil
from pathlib import Path

import jax
import numpy as np

from grpo_jax.devices.processes import from_process_zero, is_process_zero, whole_array
from grpo_jax.errors import ConfigError
from grpo_jax.recording.claims import remove_if_unused
from grpo_jax.recording.plan import Plan
from grpo_jax.recording.policy_files import (
    FOLDER,
    NUM_EPISODES,
    Arrays,
    describe_policy,
    policy_arrays,
    policy_folder,
    read_arrays,
    write_policies,
)
from grpo_jax.training.progress import Chunk, Progress
from grpo_jax.types import TrainState

_log = logging.getLogger(__name__)


class RecentReturns:
    """The mean return of each row's recent training episodes.

    Args:
      num_rows: `R`.
      past: the iterations before a resumed run goes on.

    Attributes:
      scores: `[R]` mean return of the last 100 or more episodes, of as many iterations as have them; NaN if none ended.
    """

    def __init__(self, num_rows: int, past: Chunk | None = None):
        self._returns, self._counts = np.zeros((2, 0, num_rows))
        self.scores = np.full(num_rows, np.nan)
        if past is not None and len(past.steps):
            self.add(past)

    def add(self, chunk: Chunk) -> None:
        """Adds the episodes of the next iterations."""
        returns, counts = (np.nan_to_num(chunk.metrics[f"episode/{name}"]) for name in ("return_mean", "count"))
        returns, counts = np.concatenate([self._returns, returns]), np.concatenate([self._counts, counts])
        ended_later = np.cumsum(counts[::-1], axis=0)[::-1] - counts
        counts = np.where(ended_later < NUM_EPISODES, counts, 0.0)
        kept = counts.any(axis=1)
        self._returns, self._counts = returns[kept], counts[kept]
        total = self._counts.sum(axis=0)
        self.scores = np.divide(
            (self._returns * self._counts).sum(axis=0), total, out=np.full(total.shape, np.nan), where=total > 0
        )


class KeptPolicies:
    """The final and the best policy of each row of a run. The best ones are kept on the host until they are written.

    All processes of a run make the same calls; process 0 alone writes.

    ```python
    with KeptPolicies(directory, plan) as policies:
        result = run(config, hyperparams, keys, callback=lambda progress, chunk: policies.update(progress, scores))
        policies.finish(result.states, result.steps[-1], scores)
    ```

    Args:
      directory: the folder of the run's results.
      plan: the run.
      resume: the best policies in the folder are those of this run so far.
    """

    def __init__(self, directory: Path, plan: Plan, *, resume: bool = False):
        self._folder = policy_folder(directory, plan)
        if is_process_zero():
            remove_if_unused(directory / FOLDER)
        self._description, self._num_rows = describe_policy(plan), len(plan.keys)
        self._best: Arrays | None = from_process_zero(self._read_best) if resume else None
        self._changed = self._checked = False

    def __enter__(self) -> "KeptPolicies":
        return self

    def __exit__(self, exception_type, exception, traceback) -> None:
        # The disk may be full: that is reported already.
        with contextlib.suppress(*([OSError] if exception_type else [])):
            self.save()

    def update(self, progress: Progress, scores: np.ndarray) -> None:
        """Keeps the policies of the rows whose score is higher than any before.

        Args:
          progress: the run's progress.
          scores: `[R]`, of these policies, larger is better; a row with NaN keeps its best policy.
        """
        if not self._checked:
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(policy_arrays(progress.states)))
            from_process_zero(lambda: _check_space(self._folder, 2 * size))
            self._checked = True
        improved = scores > np.nan_to_num(self._best_scores, nan=-np.inf)  # False for NaN
        if improved.any():
            self._keep(_to_host(progress.states, self._num_rows) | _progress(progress.steps, scores), improved)

    @property
    def _best_scores(self) -> np.ndarray:
        return np.full(self._num_rows, np.nan) if self._best is None else self._best["score"]

    def _keep(self, arrays: Arrays, rows: np.ndarray) -> None:
        """Keeps these rows of the arrays, bool `[R]`, as the best policies; all rows, if there are none before."""
        if self._best is None:
            self._best = arrays
        else:
            for path, leaf in arrays.items():
                self._best[path][rows] = leaf[rows]
        self._changed = True

    def save(self) -> None:
        """Writes the best policies, if there are better ones than before."""
        if self._changed:
            self._write("best", self._best)
        self._changed = False

    def finish(self, states: TrainState, steps: np.ndarray, scores: np.ndarray) -> None:
        """Writes the final policies. They are also the best ones of rows that have no better or no score yet.

        Args:
          states, steps: of the end of the run.
          scores: `[R]`, of the final policies.
        """
        final = _to_host(states, self._num_rows) | _progress(steps, scores)
        best = self._best_scores
        improved = np.isnan(best) | (scores > best)
        if improved.any():
            self._keep(final, improved)
        self._write("final", final)
        self.save()

    def _write(self, which: str, arrays: Arrays) -> None:
        if is_process_zero():
            write_policies(self._folder, self._description, {which: arrays})

    def _read_best(self) -> Arrays | None:
        """None, with a warning, if the file is damaged or missing."""
        try:
            return read_arrays(self._folder / "best.safetensors")
        except ConfigError as error:
            _log.warning("The best policies before the interruption are lost: %s", error)
            return None


def _to_host(states: TrainState, num_rows: int) -> Arrays:
    """Copies, without padding rows."""
    return {path: whole_array(leaf)[:num_rows] for path, leaf in policy_arrays(states).items()}


def _progress(steps: np.ndarray, scores: np.ndarray) -> Arrays:
    return {"score": np.array(scores, np.float64), "steps": np.array(steps, np.int64)}


def _check_space(folder: Path, needed: int) -> None:
    """Raises ConfigError if the disk has less space than the policies need."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ConfigError(
            f"the final and the best policies need {needed / 1e6:,.0f} MB, but {existing} has {free / 1e6:,.0f} MB "
            "free; use fewer rows, or a folder (--out) on another disk"
        )

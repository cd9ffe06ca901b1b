"""Host: checkpoints of whole training states, written in the background."""

import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from grpo_jax.devices.processes import from_process_zero, is_process_zero, whole_array
from grpo_jax.errors import ConfigError
from grpo_jax.recording.files import Arrays, plain, read_checked, write_checked
from grpo_jax.recording.identity import check_same
from grpo_jax.training.evaluations import no_evaluations
from grpo_jax.training.progress import Progress, initial_progress
from grpo_jax.types import TrainState, by_path

KEPT = 2
"""How many of the latest checkpoints are kept, beside the best one."""

_FIELDS = {
    **{"description": dict[str, Any], "notes": dict[str, Any], "score": float | None, "iteration": int},
    **{"steps": list[int], "seconds": float, "evaluations": list[list[Any]], "stopped": list[bool]},
    "generators": dict[str, str],
}
"""Of what is saved beside the arrays."""

_log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run: a file for each, `<iteration>.safetensors`, written in the background.

    ```python
    with Checkpoints(folder, spec.describe(), every=100) as checkpoints:
        start = checkpoints.restore(jax.eval_shape(functools.partial(initial_states, config), hyperparams, keys))
        run(config, hyperparams, keys, resume_from=start, callback=lambda progress, chunk: checkpoints.update(progress))
    ```

    All processes of a run make the same calls; process 0 alone reads and writes, and sends the others what it reads.

    Args:
      directory: for this run alone; created if it does not exist.
      description: of the run, in JSON's types. It is saved with each checkpoint: see `check_same_run`.
      every: iterations between two checkpoints, which are made at the ends of chunks.
      notes: saved as well, but may change when the run is resumed: versions of packages, for example.
    """

    def __init__(
        self, directory: Path, description: Mapping[str, Any], *, every: int, notes: Mapping[str, Any] | None = None
    ):
        self._directory = directory
        self._description, self._notes, self._every = description, notes or {}, every
        self._scores: dict[int, float] = {}  # by iteration, of the files
        self._last: tuple[Progress, float] | None = None
        self._saved = -1  # iteration of the last checkpoint
        self._writer = ThreadPoolExecutor(1)
        self._writing: Future | None = None
        if is_process_zero():
            directory.mkdir(parents=True, exist_ok=True)
            for unfinished in directory.glob(".*.tmp"):
                unfinished.unlink()
            self._scores = {iteration: _score(path) for iteration, path in _files(directory).items()}

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, exception_type, exception, traceback) -> None:
        try:
            if exception_type is None and self._last is not None:
                self.save(*self._last)
            self.wait()
        finally:
            self._writer.shutdown()

    def is_due(self, progress: Progress) -> bool:
        """Whether `update` would save."""
        return self._saved < 0 or progress.iteration // self._every > self._saved // self._every

    def update(self, progress: Progress, score: float = np.nan) -> None:
        """Saves if a checkpoint is due; the best checkpoint is that of the highest `score`, a return."""
        self._last = progress, score
        if self.is_due(progress):
            self.save(progress, score)

    def save(self, progress: Progress, score: float = np.nan) -> None:
        """Copies the states to the host, so that their buffers may be donated, and writes them in the background."""
        if progress.iteration == self._saved:
            return
        self._saved = progress.iteration
        states, num_rows = by_path(progress.states), len(progress.steps)
        arrays = {path: whole_array(_as_numbers(leaf))[:num_rows] for path, leaf in states.items()}  # without padding
        if not is_process_zero():
            return
        fields = {
            "description": self._description,
            "notes": self._notes,
            "score": score if np.isfinite(score) else None,
            "iteration": progress.iteration,
            "steps": progress.steps,
            "seconds": progress.seconds,
            "evaluations": progress.evaluations,
            "stopped": progress.stopped,
            "generators": {path: str(jax.random.key_impl(leaf)) for path, leaf in states.items() if _is_key(leaf)},
        }
        self.wait()
        self._writing = self._writer.submit(self._write, progress.iteration, arrays, plain(fields))

    def _write(self, iteration: int, arrays: Arrays, fields: Mapping[str, Any]) -> None:
        write_checked(self._path(iteration), arrays, fields)
        self._scores[iteration] = -np.inf if fields["score"] is None else fields["score"]
        iterations = sorted(self._scores)
        best = max(iterations, key=self._scores.__getitem__)
        for old in {*iterations[:-KEPT]} - {best}:
            self._remove(old)

    def _path(self, iteration: int) -> Path:
        return self._directory / f"{iteration}.safetensors"

    def _remove(self, iteration: int) -> None:
        self._path(iteration).unlink(missing_ok=True)
        self._scores.pop(iteration, None)

    def wait(self) -> None:
        """Waits until all checkpoints are on the disk; raises OSError if one could not be written."""
        writing, self._writing = self._writing, None
        try:
            if writing is not None:
                writing.result()
        except OSError as error:
            raise OSError(
                f"a checkpoint cannot be written to {self._directory}: {error.strerror or error}. Make room, or mend "
                "what is wrong; then go on with resume=True (--resume)"
            ) from None

    def restore(self, like: TrainState, *, at_most: float = np.inf) -> Progress | None:
        """The newest checkpoint that can be read; None if there are no checkpoints.

        Newer ones that cannot be read are skipped with a warning, and removed.

        Args:
          like: states of the same structure, or their shapes.
          at_most: later iterations are skipped.

        Raises:
          ConfigError: the checkpoints have states of another structure, or none of them can be read.
        """
        found = from_process_zero(lambda: self._newest(like, at_most))
        if found is None:
            return None
        arrays, fields = found
        for path, implementation in fields["generators"].items():
            arrays[path] = jax.random.wrap_key_data(arrays[path], impl=implementation)
        self._saved = fields["iteration"]
        states = jax.tree.unflatten(jax.tree.structure(like), [arrays[path] for path in by_path(like)])
        steps, stopped = np.array(fields["steps"], np.int64), np.array(fields["stopped"], bool)
        evaluations = no_evaluations(len(steps))
        for saved in zip(*fields["evaluations"], strict=True):
            evaluations = evaluations.append(*saved)
        return initial_progress(states, len(steps))._replace(
            steps=steps,
            iteration=fields["iteration"],
            seconds=fields["seconds"],
            evaluations=evaluations,
            stopped=stopped,
        )

    def _newest(self, like: TrainState, at_most: float) -> tuple[Arrays, dict[str, Any]] | None:
        """The newest checkpoint that can be read: its arrays, and what is saved beside them."""
        expected = {path: _type(leaf) for path, leaf in by_path(jax.eval_shape(_all_as_numbers, like)).items()}
        iterations = sorted(self._scores, reverse=True)
        for iteration in iterations:
            if iteration > at_most:
                _log.warning("The checkpoint of iteration %d is skipped: the metrics end before it.", iteration)
                continue
            try:
                arrays, fields = read_checked(self._path(iteration), _FIELDS)
            except ConfigError as error:
                _log.warning("The checkpoint of iteration %d is damaged (%s): an older one is tried.", iteration, error)
                continue
            check_same({path: _type(leaf) for path, leaf in arrays.items()}, expected, "state")
            for newer in iterations[: iterations.index(iteration)]:
                self._remove(newer)
            return arrays, fields
        if iterations:
            raise ConfigError(
                f"none of the checkpoints in {self._directory} can be used; to begin anew, choose another folder "
                "(--out), or move this one away"
            )
        return None


def check_same_run(directory: Path, description: Mapping[str, Any]) -> dict[str, Any] | None:
    """The notes of the newest checkpoint, which has to be of a run with this description; None if there is none.

    Raises:
      ConfigError: the checkpoint is of another run, with the first field that differs.
    """
    for _, path in sorted(_files(directory).items(), reverse=True):
        try:
            _, fields = read_checked(path, _FIELDS, only_fields=True)
        except ConfigError:  # it is damaged, as `restore` will report
            continue
        if unknown := check_same(fields["description"], plain(description)):
            _log.warning(
                "Whether %s is what the run was started with cannot be told, as its type shows nothing, or another "
                "Python compiled it; make sure of it.",
                ", ".join(unknown),
            )
        return fields["notes"]
    return None


def _files(directory: Path) -> dict[int, Path]:
    """The checkpoints in a folder by their iterations."""
    return {int(path.stem): path for path in Path(directory).glob("*.safetensors") if path.stem.isdecimal()}


def _score(path: Path) -> float:
    """Of a file; a damaged one is the worst."""
    try:
        score = read_checked(path, _FIELDS, only_fields=True)[1]["score"]
    except ConfigError:
        score = None
    return -np.inf if score is None else score


def _type(leaf: np.ndarray | jax.ShapeDtypeStruct) -> list:
    return [list(leaf.shape), str(leaf.dtype)]


def _is_key(leaf: jax.Array) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _as_numbers(leaf: jax.Array) -> jax.Array:
    """Random keys as the integers that they consist of."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _all_as_numbers(states: TrainState) -> TrainState:
    return jax.tree.map(_as_numbers, states)

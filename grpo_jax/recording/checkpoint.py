"""Host: checkpoints of whole training states, written in the background."""

import concurrent.futures
import functools
import logging
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from grpo_jax.devices.processes import from_process_zero, is_process_zero, whole_array, whole_view
from grpo_jax.errors import ConfigError
from grpo_jax.recording.files import OLD_FORMAT, Arrays, plain, read_archive, write_archive
from grpo_jax.recording.identity import check_same
from grpo_jax.training.evaluations import no_evaluations
from grpo_jax.training.progress import Progress, initial_progress
from grpo_jax.types import TrainState, by_path

KEPT = 2
"""How many of the latest checkpoints are kept, beside the best one."""

LARGE = 2**28
"""Bytes of states on a CPU from which a checkpoint is written without a copy of them, while training waits."""

_KINDS = {
    **{"description": dict[str, Any], "notes": dict[str, Any], "iteration": int, "steps": list[int]},
    **{"seconds": float, "evaluations": list[list[Any]], "stopped": list[bool], "score": float | None},
    **{"types": dict[str, list[Any]], "given": dict[str, int], "generators": dict[str, str]},
}
"""What is saved beside the arrays."""

_log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run in a folder, written in the background; an incomplete one is never read.

    ```python
    with Checkpoints(folder, spec.describe(), every=100) as checkpoints:
        start = checkpoints.restore(jax.eval_shape(functools.partial(initial_states, config), hyperparams, keys))
        run(config, hyperparams, keys, resume_from=start, callback=lambda progress, chunk: checkpoints.update(progress))
    ```

    All processes of a run make the same calls; process 0 alone reads and writes, and sends the others what it reads.

    Args:
      directory: for this run alone; created if it does not exist.
      description: of the run, in JSON's types. It is saved with each checkpoint: see `check_same_run`.
      every: iterations between two checkpoints, which are made at the ends of chunks; None: only `save` makes them.
      notes: saved as well, but may change when the run is resumed: versions of packages, for example.
      given: checksums (CRC-32), by path, of arrays of the states that whoever resumes the run has, such as the frozen
        weights of LoRA. Checkpoints hold these arrays only once they have changed.
    """

    def __init__(
        self,
        directory: Path,
        description: Mapping[str, Any],
        *,
        every: int | None,
        notes: Mapping[str, Any] | None = None,
        given: Mapping[str, int] | None = None,
    ):
        self._directory, self._every = directory, every
        self._description, self._notes, self._given = plain(description), notes or {}, given or {}
        self._writer = concurrent.futures.ThreadPoolExecutor(max_workers=1)
        self._being_written: concurrent.futures.Future | None = None
        self._last: tuple[Progress, float] | None = None
        self._saved = -1  # iteration of the last checkpoint
        if is_process_zero():
            for unfinished in directory.glob(".*.tmp"):
                unfinished.unlink()

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
        every = self._every
        return every is not None and (self._saved < 0 or progress.iteration // every > self._saved // every)

    def update(self, progress: Progress, score: float = np.nan) -> None:
        """Saves if a checkpoint is due; the best checkpoint has the highest `score`, a return."""
        self._last = progress, score
        if self.is_due(progress):
            self.save(progress, score)

    def save(self, progress: Progress, score: float = np.nan) -> None:
        """Copies the states to the host, so that their buffers may be donated, and writes them in the background.

        Large states on a CPU are not copied, but written before it returns.

        Raises:
          OSError: this checkpoint, or the one before, cannot be written; the disk may be full.
        """
        if progress.iteration == self._saved:
            return
        self._saved = progress.iteration
        num_rows, numbers = len(progress.steps), by_path(_as_numbers(progress.states))
        waits = sum(leaf.nbytes for leaf in numbers.values()) >= LARGE and jax.default_backend() == "cpu"
        arrays, given = {}, {}
        for path, leaf in numbers.items():
            array = (whole_view if waits else whole_array)(leaf)[:num_rows]  # without padding
            if path in self._given and zlib.crc32(array) == self._given[path]:
                given[path] = self._given[path]
            else:
                arrays[path] = array
        if not is_process_zero():
            return
        states = by_path(progress.states)
        fields = {
            **{"description": self._description, "notes": self._notes, "given": given},
            **{name: getattr(progress, name) for name in ("iteration", "steps", "seconds", "evaluations", "stopped")},
            "score": float(score) if np.isfinite(score) else None,
            "types": {path: [[num_rows, *leaf.shape[1:]], str(leaf.dtype)] for path, leaf in states.items()},
            "generators": {path: str(jax.random.key_impl(leaf)) for path, leaf in states.items() if _is_key(leaf)},
        }
        self.wait()
        write = functools.partial(_write, self._directory, fields, arrays)
        if waits:
            write()
        else:
            self._being_written = self._writer.submit(write)

    def wait(self) -> None:
        """Waits until all checkpoints are on the disk; OSError if one could not be written."""
        written, self._being_written = self._being_written, None
        if written is not None:
            written.result()

    def restore(
        self, like: TrainState, *, at_most: float = np.inf, given: Mapping[str, np.ndarray] | None = None
    ) -> Progress | None:
        """The newest checkpoint that can be read; None if there are no checkpoints.

        Newer ones that cannot be read are skipped with a warning, and removed.

        Args:
          like: states of the same structure, or their shapes.
          at_most: later iterations are skipped.
          given: the arrays whose checksums the class has.

        Raises:
          ConfigError: the checkpoints are of another run or have states of another structure, none of them can be
            read, or what was given has changed.
        """
        found = from_process_zero(lambda: self._newest(like, at_most, given or {}))
        if found is None:
            return None
        run, arrays = found
        for path, implementation in run["generators"].items():
            arrays[path] = jax.random.wrap_key_data(arrays[path], impl=implementation)
        self._saved = run["iteration"]
        states = jax.tree.unflatten(jax.tree.structure(like), arrays.values())
        steps, stopped = np.array(run["steps"], np.int64), np.array(run["stopped"], bool)
        evaluations = no_evaluations(len(steps))
        for saved in zip(*run["evaluations"], strict=True):
            evaluations = evaluations.append(*saved)
        return initial_progress(states, len(steps))._replace(
            steps=steps, iteration=run["iteration"], seconds=run["seconds"], evaluations=evaluations, stopped=stopped
        )

    def _newest(
        self, like: TrainState, at_most: float, given: Mapping[str, np.ndarray]
    ) -> tuple[dict[str, Any], Arrays] | None:
        """The newest checkpoint that can be read: what is saved beside the arrays, and the arrays."""
        steps = saved_iterations(self._directory)
        for i, step in enumerate(steps):
            if step > at_most:
                _log.warning("The checkpoint of iteration %d is skipped: the metrics end before it.", step)
                continue
            try:
                run, arrays = read_archive(_path(self._directory, step), _KINDS)
            except ConfigError as error:
                _log.warning("The checkpoint of iteration %d cannot be used; an older one is tried. %s", step, error)
                continue
            arrays = self._checked(run, arrays, like, given)
            for newer in steps[:i]:
                _path(self._directory, newer).unlink()
            return run, arrays
        if steps:
            raise ConfigError(
                f"none of the checkpoints in {self._directory} can be used; to begin anew, choose another "
                "folder (--out), or move this one away"
            )
        return None

    def _checked(
        self, run: Mapping[str, Any], arrays: Arrays, like: TrainState, given: Mapping[str, np.ndarray]
    ) -> Arrays:
        """All arrays of the states, in their order, with those that were given."""
        check_same(run["description"], self._description)
        types = {path: [list(leaf.shape), str(leaf.dtype)] for path, leaf in by_path(like).items()}
        check_same(run["types"], types, "state")
        if changed := [path for path, checksum in run["given"].items() if self._given.get(path) != checksum]:
            raise ConfigError(
                f"frozen weights are not those that the run began with ({changed[0]}, {len(changed)} in all), and "
                "checkpoints do not hold them; resume with the same params, for grpo-jax lm: with the model folder "
                "(--model) as it was"
            )
        return {path: given[path] if path in run["given"] else arrays[path] for path in run["types"]}


def check_same_run(directory: Path, description: Mapping[str, Any]) -> dict[str, Any] | None:
    """The notes of the newest checkpoint, which has to be of a run with this description; None if there is none.

    Raises:
      ConfigError: the checkpoint is of another run, with the first field that differs.
    """
    for step in saved_iterations(directory):
        try:
            run, _ = read_archive(_path(directory, step), _KINDS, only_fields=True)
        except ConfigError:  # it is damaged, as `restore` will report
            continue
        if unknown := check_same(run["description"], plain(description)):
            _log.warning(
                "Whether %s is what the run was started with cannot be told: its type shows nothing, or it has no "
                "source; make sure of it.",
                ", ".join(unknown),
            )
        return run["notes"]
    return None


def saved_iterations(directory: Path) -> list[int]:
    """The iterations of which there are checkpoints, the latest first; ConfigError if they are of an older format."""
    if any(path.name.isdigit() for path in Path(directory).glob("*/")):
        raise ConfigError(f"{directory} {OLD_FORMAT}")
    return sorted((int(path.stem) for path in Path(directory).glob("*.npz") if path.stem.isdigit()), reverse=True)


def _path(directory: Path, iteration: int) -> Path:
    return directory / f"{iteration}.npz"


def _write(directory: Path, fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a checkpoint, and removes those that are neither among the latest nor the best one."""
    try:
        write_archive(_path(directory, fields["iteration"]), fields, arrays)
    except OSError as error:
        raise OSError(f"{error}. Make room, or mend what is wrong; then go on with resume=True (--resume)") from error
    steps = saved_iterations(directory)
    best = max(steps, key=lambda step: _score(_path(directory, step)))
    for step in steps[KEPT:]:
        if step != best:
            _path(directory, step).unlink()


def _score(path: Path) -> float:
    try:
        score = read_archive(path, _KINDS, only_fields=True)[0]["score"]
    except ConfigError:
        score = None
    return -np.inf if score is None else score


def _is_key(leaf: jax.Array) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _as_numbers(states: TrainState) -> TrainState:
    """The tree with random keys as integers."""
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else leaf, states)

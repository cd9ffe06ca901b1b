"""Host: checkpoints of whole training states, written in the background with orbax."""

import json
import logging
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from grpo_jax.errors import ConfigError, first_line
from grpo_jax.recording.files import FORMAT, Arrays, plain
from grpo_jax.recording.identity import check_same
from grpo_jax.runs.evaluations import no_evaluations
from grpo_jax.runs.processes import from_process_zero, is_process_zero, whole_array
from grpo_jax.runs.progress import Progress, initial_progress
from grpo_jax.types import TrainState, by_path

KEPT = 2
"""How many of the latest checkpoints are kept by default."""

_FILE_SIZE = 2**26
"""Bytes of a file of a checkpoint: orbax keeps a whole file in memory, by default of 2 GiB."""

# Arrays are saved as NumPy's (see `_manager`), and a save waits for the one before: neither is news.
_NO_NEWS = re.compile("No jax.Array in TypeHandlerRegistry|Waiting for previous save")
logging.getLogger("absl").addFilter(lambda record: _NO_NEWS.search(record.getMessage()) is None)


class Checkpoints:
    """The latest checkpoints of one run in a folder, written in the background; an incomplete one is never read.

    All processes of a run make the same calls; process 0 alone reads and writes, and sends the others what it reads.

    Args:
      directory: for this run alone; created if it does not exist.
      description: of the run, in JSON's types. It is saved with each checkpoint, and compared when that is read.
      given: checksums (CRC-32), by path, of arrays of the states that whoever resumes the run has, such as the frozen
        weights of LoRA. Checkpoints hold these arrays only once they have changed.
      kept: how many of the latest checkpoints.

    Raises:
      ConfigError: the path of the directory has a character that orbax takes for a pattern.
    """

    def __init__(
        self,
        directory: Path,
        description: Mapping[str, Any],
        *,
        given: Mapping[str, int] | None = None,
        kept: int = KEPT,
    ):
        if pattern := {*"[]\\"} & {*str(directory.resolve())}:
            raise ConfigError(
                f"the folder {directory} has {min(pattern)!r} in its path, but checkpoints in it could not be read; "
                "choose a path without brackets and backslashes"
            )
        self._directory, self._description, self._given = directory, plain(description), given or {}
        self._manager = _manager(directory, kept) if is_process_zero() else None
        self.saved_at = -1
        """Iteration of the last checkpoint."""

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception) -> None:
        if self._manager is not None:
            self._manager.close()

    def save(self, progress: Progress) -> None:
        """Copies the states to the host, so that their buffers may be donated, and writes them in the background.

        Raises:
          OSError: the disk has too little space; tensorstore's ValueError for what goes wrong while it writes.
        """
        if progress.iteration == self.saved_at:
            return
        self.saved_at, num_rows = progress.iteration, len(progress.steps)
        arrays = {path: whole_array(leaf)[:num_rows] for path, leaf in by_path(_as_numbers(progress.states)).items()}
        if self._manager is None:
            return
        states = by_path(progress.states)
        given = {path: checksum for path, checksum in self._given.items() if zlib.crc32(arrays[path]) == checksum}
        run = {
            **{"format": FORMAT, "description": self._description, "given": given},
            **{name: getattr(progress, name) for name in ("iteration", "steps", "seconds", "evaluations", "stopped")},
            "types": {path: [[num_rows, *leaf.shape[1:]], str(leaf.dtype)] for path, leaf in states.items()},
            "generators": {path: str(jax.random.key_impl(leaf)) for path, leaf in states.items() if _is_key(leaf)},
        }
        # Orbax refuses empty arrays.
        arrays = {path: leaf for path, leaf in arrays.items() if leaf.size and path not in given}
        run = plain(run | {"arrays": {path: zlib.crc32(leaf) for path, leaf in arrays.items()}})
        run["checksum"] = _checksum(run)  # orbax has none of bits that have flipped
        saved = ocp.args.PyTreeSave(arrays, ocdbt_target_data_file_size=_FILE_SIZE)
        items = ocp.args.Composite(arrays=saved, run=ocp.args.JsonSave(run))
        self._manager.wait_until_finished()
        if shutil.disk_usage(self._directory).free < 2 * sum(leaf.nbytes for leaf in arrays.values()) + 2**20:
            raise OSError(  # orbax would fail in all of its threads
                f"a checkpoint cannot be written to {self._directory}: there is no space left. Make room; then go on "
                "with resume=True (--resume)"
            )
        self._manager.save(progress.iteration, args=items, force=True)

    def restore(
        self, like: TrainState, *, at_most: float = np.inf, given: Mapping[str, np.ndarray] | None = None
    ) -> Progress | None:
        """The newest checkpoint, whose later ones are removed; None if there are no checkpoints.

        Args:
          like: states of the same structure, or their shapes.
          at_most: later iterations are skipped, as the metrics end before them.
          given: the arrays whose checksums the class has.

        Raises:
          ConfigError: the checkpoints are of another run or have states of another structure, none is early enough, the
            newest cannot be read, or what was given has changed.
        """
        found = from_process_zero(lambda: self._newest(like, at_most, given or {}))
        if found is None:
            return None
        run, arrays = found
        for path, implementation in run["generators"].items():
            arrays[path] = jax.random.wrap_key_data(arrays[path], impl=implementation)
        self.saved_at = run["iteration"]
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
        """What is saved beside the arrays, and the arrays."""
        steps = self._manager.all_steps()
        step = max((step for step in steps if step <= at_most), default=None)
        begin_anew = "to begin anew, choose another folder, or move this one away"
        if step is None:
            if steps:
                raise ConfigError(f"the metrics end before all checkpoints in {self._directory}; {begin_anew}")
            return None
        try:
            found = self._read(step, like, given)
        except ConfigError:
            raise
        except Exception as error:  # the libraries below raise different ones for a damaged file
            raise ConfigError(
                f"the checkpoint {self._directory / str(step)} cannot be read ({first_line(error)[:200]}); remove it "
                f"to go on from the one before; {begin_anew}"
            ) from error
        for newer in (other for other in steps if other > step):
            self._manager.delete(newer)
        return found

    def _read(self, step: int, like: TrainState, given: Mapping[str, np.ndarray]) -> tuple[dict[str, Any], Arrays]:
        """A checkpoint, with what was given; ConfigError if it is of another run, other errors if it is damaged."""
        run = self._manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore())).run
        if run["format"] != FORMAT:
            raise ValueError(f"its format is {run['format']}, and this version of grpo-jax reads {FORMAT}")
        if run["checksum"] != _checksum(run):
            raise ValueError("what is written beside the arrays has changed")
        check_same(run["description"], self._description)
        check_same(run["types"], {path: [list(x.shape), str(x.dtype)] for path, x in by_path(like).items()}, "state")
        if changed := [path for path, checksum in run["given"].items() if self._given.get(path) != checksum]:
            raise ConfigError(
                f"frozen weights are not those that the run began with ({changed[0]}, {len(changed)} in all), and "
                "checkpoints do not hold them; resume with the same params, for grpo-jax lm: with the model folder "
                "(--model) as it was"
            )
        numbers = by_path(jax.eval_shape(_as_numbers, like))
        arrays = {path: np.empty(leaf.shape, leaf.dtype) for path, leaf in numbers.items()}
        arrays |= {path: given[path] for path in run["given"]}
        saved = {path: leaf for path, leaf in arrays.items() if leaf.size and path not in run["given"]}
        arrays |= self._manager.restore(step, args=ocp.args.Composite(arrays=ocp.args.PyTreeRestore(saved))).arrays
        if damaged := [path for path in saved if zlib.crc32(arrays[path]) != run["arrays"][path]]:
            raise ValueError(f"{damaged[0]} has changed since it was written")
        return run, arrays


def _manager(directory: Path, kept: int) -> ocp.CheckpointManager:
    processes = ocp.options.MultiprocessingOptions(primary_host=0, active_processes={0})
    # All processes would have to take part in making the folder.
    options = ocp.CheckpointManagerOptions(max_to_keep=kept, multiprocessing_options=processes, create=False)
    directory.mkdir(parents=True, exist_ok=True)
    handler = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)  # `save` makes copies
    types = ocp.type_handlers.create_type_handler_registry((np.ndarray, handler))
    arrays = ocp.PyTreeCheckpointHandler(type_handler_registry=types, multiprocessing_options=processes)
    handlers = {"arrays": arrays, "run": ocp.JsonCheckpointHandler(multiprocessing_options=processes)}
    return ocp.CheckpointManager(directory.resolve(), options=options, item_handlers=handlers)


def _checksum(run: Mapping[str, Any]) -> int:
    """Of all but the checksum itself."""
    return zlib.crc32(json.dumps({**run, "checksum": None}, sort_keys=True).encode())


def _is_key(leaf: jax.Array) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _as_numbers(states: TrainState) -> TrainState:
    """The tree with random keys as integers."""
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else leaf, states)

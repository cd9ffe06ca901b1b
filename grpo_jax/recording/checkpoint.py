"""Host: whole training states saved while training goes on, and found again after any kind of end (orbax)."""

import contextlib
import dataclasses
import logging
import math
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

from grpo_jax.algorithms import Algorithm
from grpo_jax.config.config import Config
from grpo_jax.devices.processes import from_process_zero, is_process_zero, whole_array
from grpo_jax.errors import ConfigError
from grpo_jax.training.run import Progress
from grpo_jax.types import PyTree, TrainState

KEPT = 2
"""Latest checkpoints that are kept, beside the best one."""

_NO_SCORE = -float(np.finfo(np.float32).max)
_log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run in a folder, written in the background; one that is not complete does not count.

    ```python
    with Checkpoints(folder, {"config": describe(config)}, every=100) as checkpoints:
        start = checkpoints.restore(jax.eval_shape(functools.partial(initial_states, config), hyperparams, keys))
        run(config, hyperparams, keys, resume_from=start, save=checkpoints.update)
    ```

    Of several processes, all make the same calls; process 0 alone reads and writes, and passes on what it read.

    Args:
      directory: of this run alone; made if missing.
      about: what the run is, as JSON has it: saved with each checkpoint, see `check_same_run`.
      every: iterations between two checkpoints; they fall on the ends of chunks.
      notes: what else to save, which may change from one process to the next, such as versions.
    """

    def __init__(
        self, directory: Path, about: Mapping[str, Any], *, every: int, notes: Mapping[str, Any] | None = None
    ):
        self._about, self._notes, self._every = about, notes or {}, every
        self._manager = _cleaned_manager(directory) if is_process_zero() else None
        self._last: tuple[Progress, float] | None = None
        self._saved = -1  # iteration of the last checkpoint

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, exception_type, exception, traceback) -> None:
        if exception_type is None and self._last is not None:
            self.save(*self._last)
        if self._manager is not None:
            with _disk_errors():
                self._manager.close()

    def update(self, progress: Progress, score: float = np.nan) -> None:
        """Saves if it is time to; `score`, a return, says which checkpoint is the best."""
        self._last = progress, score
        if self._saved < 0 or progress.iteration // self._every > self._saved // self._every:
            self.save(progress, score)

    def save(self, progress: Progress, score: float = np.nan) -> None:
        """Copies the states to the host, so that their buffers can be donated at once, and writes them meanwhile."""
        if progress.iteration == self._saved:
            return
        self._saved = progress.iteration
        states, num_rows = _by_path(progress.states), len(progress.steps)
        numbers = _by_path(_as_numbers(progress.states))
        arrays = {path: whole_array(leaf)[:num_rows] for path, leaf in numbers.items()}  # without rows that only pad
        if self._manager is None:
            return
        run = {
            "about": self._about,
            "notes": self._notes,
            "iteration": progress.iteration,
            "steps": progress.steps.tolist(),
            "seconds": progress.seconds,
            "types": {path: [[num_rows, *leaf.shape[1:]], str(leaf.dtype)] for path, leaf in states.items()},
            "checksums": {path: zlib.crc32(leaf) for path, leaf in arrays.items()},
            "generators": {path: str(jax.random.key_impl(leaf)) for path, leaf in states.items() if _is_key(leaf)},
        }
        arrays = {path: leaf for path, leaf in arrays.items() if leaf.size}  # orbax refuses empty ones
        items = ocp.args.Composite(arrays=ocp.args.PyTreeSave(arrays), run=ocp.args.JsonSave(_strict(run)))
        metrics = {"return": float(score) if np.isfinite(score) else _NO_SCORE}
        with _disk_errors():  # also of the one before, which was written meanwhile
            self._manager.save(progress.iteration, args=items, metrics=metrics, force=True)

    def wait(self) -> None:
        """Until all that was saved is on the disk."""
        if self._manager is not None:
            with _disk_errors():
                self._manager.wait_until_finished()

    def restore(self, like: TrainState, *, at_most: float = np.inf) -> Progress | None:
        """Where to go on from: the newest checkpoint that can be read; None if there is none at all.

        Those that cannot be read are passed over with a warning, and removed once an older one could.

        Args:
          like: states of the same structure, or their shapes.
          at_most: the highest iteration of interest.

        Raises:
          ConfigError: there are checkpoints, but of other states, or none can be used.
        """
        found = from_process_zero(lambda: self._newest(like, at_most))
        if found is None:
            return None
        run, arrays = found
        for path, implementation in run["generators"].items():
            arrays[path] = jax.random.wrap_key_data(arrays[path], impl=implementation)
        self._saved = run["iteration"]
        states = jax.tree.unflatten(jax.tree.structure(like), arrays.values())
        return Progress(states, np.array(run["steps"], np.int64), run["iteration"], run["seconds"])

    def _newest(self, like: TrainState, at_most: float) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
        """What is saved of the newest checkpoint that can be read, and its arrays."""
        steps = sorted(self._manager.all_steps(), reverse=True)
        for step in steps:
            if step > at_most:
                _log.warning("The checkpoint of iteration %d is passed over: the metrics end before it.", step)
                continue
            try:
                found = self._read(step, like)
            except ConfigError:
                raise
            except Exception as error:  # a damaged file shows itself in as many ways as there are libraries below
                reason = str(error).strip().split("\n")[0][:200]
                _log.warning("The checkpoint of iteration %d is damaged (%s): an older one is tried.", step, reason)
                continue
            for newer in steps[: steps.index(step)]:
                self._manager.delete(newer)
            return found
        if steps:
            raise ConfigError(
                f"none of the checkpoints in {self._manager.directory} can be used; to begin anew, choose another "
                "folder (--out), or move this one away"
            )
        return None

    def _read(self, step: int, like: TrainState) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        run = _read_run(self._manager, step)
        check_same(run["types"], {path: _type(leaf) for path, leaf in _by_path(like).items()}, "state")
        numbers = _by_path(jax.eval_shape(_as_numbers, like))
        arrays = {path: np.empty(leaf.shape, leaf.dtype) for path, leaf in numbers.items()}
        saved = {path: leaf for path, leaf in arrays.items() if leaf.size}
        arrays |= self._manager.restore(step, args=ocp.args.Composite(arrays=ocp.args.PyTreeRestore(saved))).arrays
        for path, leaf in arrays.items():
            if zlib.crc32(leaf) != run["checksums"][path]:
                raise ValueError(f"{path} has changed since it was written")
        return run, arrays


def check_same_run(directory: Path, about: Mapping[str, Any]) -> dict[str, Any] | None:
    """The notes of the newest checkpoint, None if there is none; it has to be of this run.

    Raises:
      ConfigError: they are of another one; names the first field that differs.
    """
    if not Path(directory).exists():
        return None
    with contextlib.closing(_manager(directory)) as manager:
        for step in sorted(manager.all_steps(), reverse=True):
            try:
                run = _read_run(manager, step)
            except Exception:  # a damaged one, of which `restore` warns
                continue
            check_same(run["about"], _strict(about))
            return run["notes"]
    return None


def check_same(saved: Any, now: Any, name: str = "") -> None:
    """Raises ConfigError, with the path of the first difference, unless two values of JSON are equal."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        for field in {**saved, **now}:
            check_same(saved.get(field), now.get(field), f"{name}.{field}".lstrip("."))
    elif saved != now:
        raise ConfigError(
            f"{name} is {now!r} here, and {saved!r} in the checkpoints; to resume, write what the run was started "
            "with, or choose another folder (--out) for a new run"
        )


def describe(config: Config) -> dict[str, Any]:
    """The fields of a config in JSON's types; an algorithm by the names of what is in its slots."""

    def plain(value):
        if isinstance(value, Algorithm):
            return {slot: plain(part) for slot, part in value._asdict().items()}
        if isinstance(value, tuple):
            return [plain(part) for part in value]
        return getattr(value, "__qualname__", value)

    fields = {field.name: plain(getattr(config, field.name)) for field in dataclasses.fields(config)}
    return fields | {"environment": config.env.name, "env_params": dict(config.env_params)}


class _OneByOne(ocp.type_handlers.NumpyHandler):
    """Reads arrays one after the other.

    Of several at once, the others would still be under way when one is found damaged, and orbax ends its event loop.
    """

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> list[np.ndarray]:
        arrays = []
        for i, info in enumerate(infos):
            arrays += await super().deserialize([info], None if args is None else [args[i]])
        return arrays


def _manager(directory: Path) -> ocp.CheckpointManager:
    def score(metrics):
        return metrics["return"]

    best = managers.BestN(get_metric_fn=score, n=1, keep_checkpoints_without_metrics=False)
    kept = managers.AnyPreservationPolicy([managers.LatestN(KEPT), best])
    processes = ocp.options.MultiprocessingOptions(primary_host=0, active_processes={0})
    options = ocp.CheckpointManagerOptions(
        preservation_policy=kept,
        best_fn=score,  # without it the metrics are not written, and the next process would know of no best
        multiprocessing_options=processes,
        create=False,  # orbax has every process take part in that
    )
    Path(directory).mkdir(parents=True, exist_ok=True)
    types = ocp.type_handlers.create_type_handler_registry((np.ndarray, _OneByOne()))
    arrays = ocp.PyTreeCheckpointHandler(type_handler_registry=types, multiprocessing_options=processes)
    handlers = {"arrays": arrays, "run": ocp.JsonCheckpointHandler(multiprocessing_options=processes)}
    return ocp.CheckpointManager(Path(directory).resolve(), options=options, item_handlers=handlers)


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    """As OSError, also where tensorstore found them, whose own are ValueErrors."""
    try:
        yield
    except ValueError as error:
        if "os_error_code" in str(error):
            raise OSError(f"a checkpoint cannot be written: {error}") from error
        raise


def _cleaned_manager(directory: Path) -> ocp.CheckpointManager:
    """Without the saves that were not finished: the manager's own cleanup goes on while it reads the folder."""
    for unfinished in Path(directory).glob("*.orbax-checkpoint-tmp*"):
        shutil.rmtree(unfinished)
    return _manager(directory)


def _read_run(manager: ocp.CheckpointManager, step: int) -> dict[str, Any]:
    """All but the arrays."""
    return manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore())).run


def _strict(value: Any) -> Any:
    """In JSON's own types, as it is read back: JSON has no numbers that are not finite, which become words."""
    match value:
        case Mapping():
            return {str(key): _strict(item) for key, item in value.items()}
        case list() | tuple():
            return [_strict(item) for item in value]
        case float() if not math.isfinite(value):
            return str(value)
    return value


def _by_path(tree: PyTree) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _type(leaf: jax.Array | jax.ShapeDtypeStruct) -> list:
    return [list(leaf.shape), str(leaf.dtype)]


def _is_key(leaf: jax.Array) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _as_numbers(states: TrainState) -> TrainState:
    """Random keys as the integers they are made of."""
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else leaf, states)

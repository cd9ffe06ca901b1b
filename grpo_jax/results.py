"""Host: the folder of an experiment's results: one process makes it its own, whole files are replaced at once."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"

# What this process made its own, with the files that lock it: the runs of one experiment follow each other there.
_claimed: dict[Path, TextIO] = {}


class Record(NamedTuple):
    """What `metrics.jsonl` says of one run; a `MetricsChunk` from the run's beginning."""

    metrics: dict[str, np.ndarray]  # each float32 [n, num_seeds]
    steps: np.ndarray  # int64 [n, num_seeds]
    iteration: int = 0
    seconds: float = 0.0

    def until(self, iteration: int, seconds: float = 0.0) -> "Record":
        """The iterations before that one, which took so long."""
        metrics = {name: values[:iteration] for name, values in self.metrics.items()}
        return self._replace(metrics=metrics, steps=self.steps[:iteration], seconds=seconds)


def claim_directory(path: Path, *, resume: bool = False, again: bool = False) -> Path:
    """Make `path` the folder of this process's results, or refuse it.

    Creates the folder and an empty `metrics.jsonl` in it, and locks it for as long as the process lives, however that
    ends. Of two processes that claim one folder at the same moment, one succeeds. An experiment calls this once, before
    it compiles; its Logbooks, which claim it `again`, then write there one after another. With `resume` the folder may
    hold results.

    Raises:
      FileExistsError: the folder holds a run's results already, another process writes there, or `path` is a file.
        Nothing was written.
    """
    path = Path(path)
    advice = "Nothing was written. Choose another folder (--out), or move the old one away."
    if not resume and (path / "checkpoints").is_dir():
        advice = f"{advice[:-1]}; or go on with it (--resume)."
    for part in (path, *path.parents):
        if part.is_file():
            raise FileExistsError(f"{part} is a file, so it cannot be the folder of a run. {advice}")
    if (resume or again) and path.resolve() in _claimed:
        return path
    path.mkdir(parents=True, exist_ok=True)
    if not resume:
        if (path / SUMMARY_FILE).exists():
            raise FileExistsError(f"{path} already holds a run ({SUMMARY_FILE}). {advice}")
        try:
            (path / METRICS_FILE).open("x").close()
        except FileExistsError:
            raise FileExistsError(f"{path} already holds a run ({METRICS_FILE}). {advice}") from None
    lock = (path / ".lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FileExistsError(f"another process is writing to {path}. Wait for it, or end it first.") from None
    except OSError:  # a file system without locks
        pass
    (path / METRICS_FILE).touch()
    _claimed[path.resolve()] = lock
    return path


def read_record(directory: Path, run: str) -> Record:
    """What `metrics.jsonl` has of a run, iteration by iteration; a last line that was not finished is left out.

    What is null there is NaN, or 0 if it is `environment/steps`.
    """
    lines = []
    for line in read_lines(directory):
        if line["run"] == run:
            if line["iteration"] != len(lines):
                break
            lines.append(line)
    names = [name for name in (lines[0] if lines else ()) if name not in ("run", "iteration", "environment_steps")]
    metrics = {name: np.array([line[name] for line in lines], np.float32) for name in names}
    if "environment/steps" in metrics:
        steps = np.array([line["environment/steps"] for line in lines], np.float64)  # null in rows that had stopped
        metrics["environment/steps"] = np.nan_to_num(steps).astype(np.int32)
    return Record(metrics, np.array([line["environment_steps"] for line in lines], np.int64))


def read_lines(directory: Path) -> Iterator[dict[str, Any]]:
    """Every line of `metrics.jsonl`, of all runs, but those that were not finished."""
    path = Path(directory) / METRICS_FILE
    if path.exists():
        with path.open(encoding="utf-8") as file:
            for line in file:
                with contextlib.suppress(json.JSONDecodeError):  # cut off when its writer was killed
                    yield json.loads(line)


def cut_record(directory: Path, run: str, num_iterations: int) -> None:
    """Removes from `metrics.jsonl` what it says of a run from that iteration on."""
    kept = [line for line in read_lines(directory) if line["run"] != run or line["iteration"] < num_iterations]
    _replace(directory / METRICS_FILE, "".join(json.dumps(line) + "\n" for line in kept))


def write_json(path: Path, value: Any) -> None:
    """Write `value` as strict JSON, atomically: a reader finds the old file or the new one, never a part.

    Arrays become lists, NaN and infinities null, paths strings.

    Raises:
      TypeError: a value that JSON has no form for. The old file stays as it was.
    """
    _replace(Path(path), json.dumps(_plain(value), indent=2, allow_nan=False) + "\n")


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    """`value` in JSON's own types."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "__array__"):
        return _plain(np.asarray(value).tolist())
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value

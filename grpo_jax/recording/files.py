"""Host: the folder of an experiment's results: one process makes it its own, whole files are replaced at once."""

import collections
import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"


class _Claim(NamedTuple):
    lock: TextIO
    made: list[Path]  # folders and empty files that were not there before, the outermost first
    parts: list[Path]  # likewise not there before: what goes if nothing is recorded, whatever is in it


# What this process made its own: the runs of one experiment follow each other there.
_claimed: dict[Path, _Claim] = {}


class Record(NamedTuple):
    """What `metrics.jsonl` says of one run; a `MetricsChunk` from the run's beginning."""

    metrics: dict[str, np.ndarray]  # each [n, num_seeds], float32; environment/steps int32
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
      OSError: it cannot be written to.
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
    for name in () if resume else (SUMMARY_FILE, METRICS_FILE):
        if (path / name).exists():
            raise FileExistsError(f"{path} already holds a run ({name}). {advice}")
    made: list[Path] = []
    try:
        lock = _made_own(path, made)
        if not _create(path.resolve() / METRICS_FILE, made) and not resume:
            raise FileExistsError(f"{path} already holds a run ({METRICS_FILE}). {advice}")
    except BaseException as error:
        _remove(made)
        if isinstance(error, OSError) and not isinstance(error, FileExistsError):
            raise OSError(f"{path} cannot be written to: {error}. Choose another folder (--out).") from error
        raise
    _claimed[path.resolve()] = _Claim(lock, made, [])
    return path


def part_of_record(path: Path) -> Path:
    """The path of what is worth nothing without a record, such as checkpoints: it goes if none is begun."""
    if not path.exists():
        for folder, claim in _claimed.items():
            if path.resolve().is_relative_to(folder):
                claim.parts.append(path.resolve())
    return path


def _made_own(path: Path, made: list[Path]) -> TextIO:
    """The lock of the folder, which is there now; adds to `made` what was not there before."""
    path = path.resolve()
    made += [folder for folder in (*reversed(path.parents), path) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    _create(path / ".lock", made)
    lock = (path / ".lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FileExistsError(f"another process is writing to {path}. Wait for it, or end it first.") from None
    except OSError:  # a file system without locks
        pass
    return lock


def _create(path: Path, made: list[Path]) -> bool:
    """Makes an empty file and adds it to `made`; False, and nothing done, if there is one already."""
    try:
        path.open("x").close()
    except FileExistsError:
        return False
    made.append(path)
    return True


def _remove(made: list[Path]) -> None:
    """Removes those of these folders and files that are still empty, the innermost first."""
    for path in reversed(made):
        with contextlib.suppress(OSError):
            if path.is_dir():
                path.rmdir()  # refuses unless it is empty
            elif path.stat().st_size == 0:
                path.unlink()


@contextlib.contextmanager
def given_back_if_unused(directory: Path = Path("/")) -> Iterator[None]:
    """If what is done within fails before anything is recorded, the claimed folders in `directory` are as before.

    A start that is corrected then finds no old run. What was there before stays, and so does what others wrote. A
    SystemExit is no failure: what a signal ended is saved.
    """
    try:
        yield
    except SystemExit:
        raise
    except BaseException:
        used = [path for path in _claimed if any(file.stat().st_size for file in path.glob(METRICS_FILE))]
        for path in reversed([path for path in _claimed if path.is_relative_to(directory.resolve())]):
            if not any(other.is_relative_to(path) for other in used):
                claim = _claimed.pop(path)
                for part in claim.parts:
                    shutil.rmtree(part, ignore_errors=True) if part.is_dir() else part.unlink(missing_ok=True)
                _remove(claim.made)
                claim.lock.close()
        raise


def kept() -> str:
    """What is in the folders of this process; empty if it has none."""
    lines = []
    for path in _claimed:
        counts = collections.Counter(line["run"] for line in read_lines(path))
        there = [f"{count} iterations of {run!r}" for run, count in counts.items()]
        there += [SUMMARY_FILE] * (path / SUMMARY_FILE).exists()
        there += ["checkpoints, from which --resume goes on"] * (path / "checkpoints").exists()
        if there:
            lines.append(f"{path} keeps {', '.join(there)}")
    return "; ".join(lines)


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

"""Host: the folder of a run's results is claimed, so that one process at a time writes there."""

import collections
import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from grpo_jax.recording.files import METRICS_FILE, SUMMARY_FILE, read_lines


class _Claim(NamedTuple):
    lock: TextIO
    created: list[Path]  # folders and empty files that the claim created, the outermost first
    removable: list[Path]  # created since: removed with all that they contain if no iteration is recorded


# The folders that this process has claimed. Several runs of one process may record in the same folder.
_claims: dict[Path, _Claim] = {}


def claim_directory(path: Path, *, resume: bool = False, again: bool = False) -> Path:
    """Claims a folder for the results of this process.

    Creates the folder with an empty `metrics.jsonl` and locks it until the process ends. If two processes claim a
    folder at the same moment, one of them succeeds.

    Args:
      path: the folder.
      resume: the folder may contain results.
      again: this process may have claimed the folder before.

    Raises:
      FileExistsError: the folder contains results, another process writes to it, or `path` is a file. Nothing was
        written.
      OSError: the folder cannot be written to.
    """
    path = Path(path)
    advice = "Nothing was written. Choose another folder (--out), or move the old one away."
    if not resume and (path / "checkpoints").is_dir():
        advice = f"{advice[:-1]}; or go on with it (resume=True, --resume)."
    for part in (path, *path.parents):
        if part.is_file():
            raise FileExistsError(f"{part} is a file, so it cannot be the folder of a run. {advice}")
    if (resume or again) and path.resolve() in _claims:
        return path
    for name in () if resume else (SUMMARY_FILE, METRICS_FILE):
        if (path / name).exists():
            raise FileExistsError(f"{path} already holds a run ({name}). {advice}")
    for part in (path, *path.glob("*/"), *path.glob("*/*/")):
        if part.is_dir() and not os.access(part, os.W_OK | os.X_OK):
            raise OSError(f"{path} cannot be written to: {part} is read-only. Choose another folder (--out).")
    created: list[Path] = []
    try:
        lock = _lock(path, created)
        if not _create(path.resolve() / METRICS_FILE, created) and not resume:
            raise FileExistsError(f"{path} already holds a run ({METRICS_FILE}). {advice}")
    except BaseException as error:
        _remove_empty(created)
        if isinstance(error, OSError) and not isinstance(error, FileExistsError):
            raise OSError(f"{path} cannot be written to: {error}. Choose another folder (--out).") from error
        raise
    _claims[path.resolve()] = _Claim(lock, created, [])
    return path


def remove_if_unused(path: Path) -> Path:
    """Returns `path`, which is removed if no iteration is recorded: see `release_if_unused`."""
    if not path.exists():
        for folder, claim in _claims.items():
            if path.resolve().is_relative_to(folder):
                claim.removable.append(path.resolve())
    return path


def _lock(path: Path, created: list[Path]) -> TextIO:
    """Creates a folder and locks it; adds to `created` what did not exist before."""
    path = path.resolve()
    created += [folder for folder in (*reversed(path.parents), path) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    name, made = path / ".lock", []
    for _ in range(100):
        _create(name, made)
        lock = name.open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            break
        except OSError:  # a file system without locks
            pass
        # A process that leaves the folder unused removes the file: whoever has opened it by then locks nothing.
        if name.exists() and os.path.samestat(os.fstat(lock.fileno()), name.stat()):
            created += made  # not before: the file belongs to whoever has the lock
            return lock
        lock.close()
    lock.close()
    raise FileExistsError(f"another process is writing to {path}. Wait for it, or end it first.")


def _create(path: Path, created: list[Path]) -> bool:
    """Creates an empty file and adds it to `created`; False if it exists already."""
    try:
        path.open("x").close()
    except FileExistsError:
        return False
    created.append(path)
    return True


def _remove_empty(paths: list[Path]) -> None:
    """Removes those of these folders and files that are empty, the last ones first."""
    for path in reversed(paths):
        with contextlib.suppress(OSError):
            if path.is_dir():
                path.rmdir()  # refuses unless it is empty
            elif path.stat().st_size == 0:
                path.unlink()


@contextlib.contextmanager
def release_if_unused(directory: Path = Path("/")) -> Iterator[None]:
    """If the block fails before an iteration is recorded, releases the claimed folders in `directory`.

    Deletes what this process created, so the command can be repeated. Files that existed before or that others wrote
    stay. A SystemExit is not a failure: a run that a signal ended is saved.
    """
    try:
        yield
    except SystemExit:
        raise
    except BaseException:
        used = [path for path in _claims if any(file.stat().st_size for file in path.glob(METRICS_FILE))]
        for path in reversed([path for path in _claims if path.is_relative_to(directory.resolve())]):
            if not any(other.is_relative_to(path) for other in used):
                claim = _claims.pop(path)
                for removable in claim.removable:
                    if removable.is_dir():
                        shutil.rmtree(removable, ignore_errors=True)
                    else:
                        removable.unlink(missing_ok=True)
                _remove_empty(claim.created)
                claim.lock.close()
        raise


def describe_claims() -> str:
    """One line on what the folders of this process contain; empty if that is nothing."""
    lines = []
    for path in _claims:
        counts = collections.Counter(line["run"] for line in read_lines(path))
        contents = [f"{count} iterations of {run!r}" for run, count in counts.items()]
        contents += [SUMMARY_FILE] * (path / SUMMARY_FILE).exists()
        contents += ["checkpoints, from which --resume goes on"] * (path / "checkpoints").exists()
        if contents:
            lines.append(f"{path} keeps {', '.join(contents)}")
    return "; ".join(lines)

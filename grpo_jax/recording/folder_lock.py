"""Host: one process at a time writes to the folder of a run, and signals wait until it has written."""

import contextlib
import fcntl
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from grpo_jax.recording.metrics_file import METRICS_FILE

SUMMARY_FILE = "summary.json"
SIGNALS = signal.SIGTERM, signal.SIGINT
# What runs and commands write before the first iteration, and can write again; a warm start is not among it.
_BEGUN = [".lock", METRICS_FILE, "checkpoints", "policies", "programs", "tensorboard", "wandb"]
_BEGUN += ["accuracy.json", "held_out.json", "samples.jsonl"]


class _Lock(NamedTuple):
    file: TextIO  # held until the process ends
    made: list[Path]  # the folders that did not exist before, the innermost first
    before: set[Path]  # what the folder contained


_locks: dict[Path, _Lock] = {}  # of this process


def lock_run_folder(path: Path, *, resume: bool = False) -> None:
    """Creates a folder for results, and locks it until the process ends; several runs of the process may share it.

    Raises:
      FileExistsError: the folder contains results and `resume` is False, or another process writes to it.
      OSError: the folder cannot be made or written to.
    """
    path = Path(os.path.realpath(path))
    for name in () if resume else (SUMMARY_FILE, METRICS_FILE):
        if os.path.exists(path / name):
            more = "; or go on with it (resume=True, --resume)" if (path / "checkpoints").is_dir() else ""
            raise FileExistsError(
                f"{path} already holds a run ({name}). Nothing was written. Choose another folder (--out), or move the "
                f"old one away{more}."
            )
    if path not in _locks:
        made = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
        try:
            path.mkdir(parents=True, exist_ok=True)
            before = {*path.iterdir()} - {path / ".lock"}
            file = (path / ".lock").open("a")
        except OSError as error:
            is_file = isinstance(error, FileExistsError | NotADirectoryError)
            reason = "a part of it is a file or a broken link" if is_file else error.strerror
            raise OSError(f"{path} cannot be written to: {reason}. Choose another folder (--out).") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileExistsError(f"another process is writing to {path}. Wait for it, or end it first.") from None
        except OSError:
            pass  # a file system without locks
        _locks[path] = _Lock(file, made, before)


@contextlib.contextmanager
def clean_up_on_error(directory: Path = Path("/")) -> Iterator[None]:
    """If the block fails before an iteration is recorded, removes what runs began in locked folders in `directory`.

    Files with other names stay. A SystemExit is not a failure: a run that a signal ended is saved.
    """
    try:
        yield
    except SystemExit:
        raise
    except BaseException:
        for path in sorted((path for path in _locks if path.is_relative_to(os.path.realpath(directory))), reverse=True):
            if _has_iterations(path):
                continue
            lock = _locks.pop(path)
            for part in {path / name for name in _BEGUN} - lock.before:
                shutil.rmtree(part, ignore_errors=True) if part.is_dir() else part.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it is not empty
                for folder in lock.made:
                    folder.rmdir()
            lock.file.close()
        raise


def describe_locked() -> str:
    """One line on which folders of this process hold iterations; empty if that is none."""
    return "; ".join(f"{path} keeps what was written" for path in _locks if _has_iterations(path))


def _has_iterations(path: Path) -> bool:
    files = path / METRICS_FILE, path / "programs" / METRICS_FILE
    return any(file.is_file() and file.stat().st_size for file in files)


class StopSignal(SystemExit):
    """A signal ended a run between two chunks, and all of it is saved. Exits with the code that shells expect.

    Attributes:
      name: of the signal.
      folder: with the run's results.
    """

    def __init__(self, number: int, folder: Path = Path()):
        super().__init__(128 + number)
        self.name, self.folder = signal.Signals(number).name, folder


@contextlib.contextmanager
def deferred_signals() -> Iterator[list[int]]:
    """Defers SIGTERM and SIGINT (Ctrl-C) to the end of the block; yields the list of those received so far.

    A second SIGINT interrupts. Python notices signals once a compiled program has ended. If an exception ends the
    block, the deferred signals are dropped. Only the main thread receives signals: in another one, nothing is deferred.
    """
    received: list[int] = []

    def handle(number, frame):
        if number == signal.SIGINT and received:
            raise KeyboardInterrupt
        received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    handlers = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
    if received:
        signal.raise_signal(received[0])

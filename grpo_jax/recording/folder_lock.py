"""Host: one process at a time writes to the folder of a run, and signals wait until it has written."""

import collections
import contextlib
import fcntl
import os
import select
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from grpo_jax.recording.metrics_file import METRICS_FILE, read_lines

SUMMARY_FILE = "summary.json"
# What runs and commands write before the first iteration, and can write again; a warm start is not among it.
_BEGUN = {".lock", METRICS_FILE, "checkpoints", "policies", "programs", "tensorboard", "wandb"}
_BEGUN |= {"accuracy.json", "held_out.json", "samples.jsonl"}


class _Lock(NamedTuple):
    file: TextIO  # held until the process ends
    made: list[Path]  # the folders that did not exist before, the outermost first
    before: set[Path]  # what the folder contained


_locks: dict[Path, _Lock] = {}  # of this process


def lock_run_folder(path: Path, *, resume: bool = False) -> None:
    """Creates a folder for results, and locks it until the process ends; several runs of the process may share it.

    Raises:
      FileExistsError: the folder contains results and `resume` is False, another process writes to it, or `path` is a
        file. Nothing was written.
      OSError: the folder cannot be written to.
    """
    try:
        path = Path(os.path.realpath(path))
        _check_usable(path, resume)
        if path not in _locks:
            made = [folder for folder in (*reversed(path.parents), path) if not folder.exists()]
            _locks[path] = _Lock(_lock(path), made, {*path.iterdir()} - {path / ".lock"})
    except FileExistsError:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"{path} cannot be written to: {reason}. Choose another folder (--out).") from error


def _check_usable(path: Path, resume: bool) -> None:
    advice = "Nothing was written. Choose another folder (--out), or move the old one away"
    for part in (path, *path.parents):
        if os.path.lexists(part) and not part.is_dir():
            raise FileExistsError(f"{part} is a file or a broken link, so it cannot be the folder of a run. {advice}.")
    for name in () if resume else (SUMMARY_FILE, METRICS_FILE):
        if (path / name).exists():
            more = "; or go on with it (resume=True, --resume)" if (path / "checkpoints").is_dir() else ""
            raise FileExistsError(f"{path} already holds a run ({name}). {advice}{more}.")
    for part in (path, *path.glob("*/"), *path.glob("*/*/")):
        if part.is_dir() and not os.access(part, os.W_OK | os.X_OK):
            raise OSError(f"{part} is read-only")


def _lock(path: Path) -> TextIO:
    while True:
        path.mkdir(parents=True, exist_ok=True)
        file = (path / ".lock").open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise FileExistsError(f"another process is writing to {path}. Wait for it, or end it first.") from None
        except OSError:  # a file system without locks
            return file
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), (path / ".lock").stat()):
                return file
        file.close()  # a process whose start failed has removed it


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
            lock = _locks[path]
            new = {*path.iterdir()} - lock.before
            metrics = path / METRICS_FILE, *(part / METRICS_FILE for part in new)
            if not any(file.is_file() and file.stat().st_size for file in metrics):
                for part in (part for part in new if part.name in _BEGUN):
                    shutil.rmtree(part, ignore_errors=True) if part.is_dir() else part.unlink(missing_ok=True)
                for folder in reversed(lock.made):
                    with contextlib.suppress(OSError):  # it is not empty
                        folder.rmdir()
                _locks.pop(path).file.close()
        raise


def describe_locked() -> str:
    """One line on what the folders of this process contain; empty if that is nothing."""
    lines = []
    for path in _locks:
        counts = collections.Counter(line["run"] for line in read_lines(path))
        contents = [f"{count} iterations of {run!r}" for run, count in counts.items()]
        contents += [SUMMARY_FILE] * (path / SUMMARY_FILE).exists()
        contents += ["checkpoints, from which --resume goes on"] * (path / "checkpoints").exists()
        if contents:
            lines.append(f"{path} keeps {', '.join(contents)}")
    return "; ".join(lines)


SIGNALS = signal.SIGTERM, signal.SIGINT


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
def _answered() -> Iterator[None]:
    """Answers signals from a thread, since Python's handlers wait until a compiled program has ended.

    A second SIGINT ends the process after five seconds, if Python has not been interrupted by then: not in a notebook.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def answer():
        if (number := os.read(reader, 1)) and number[0] in SIGNALS:
            name = signal.Signals(number[0]).name
            os.write(2, f"\n{name}: stopping after this chunk of iterations; press Ctrl-C again to stop now\n".encode())
        if os.read(reader, 1) and not select.select([reader], [], [], 5)[0] and "ipykernel" not in sys.modules:
            os._exit(128 + signal.SIGINT)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)  # which ends the thread
        thread.join()
        os.close(reader)


@contextlib.contextmanager
def deferred_signals() -> Iterator[list[int]]:
    """Defers SIGTERM and SIGINT (Ctrl-C) to the end of the block; yields the list of those received so far.

    The first one is answered with a line at once, also while a compiled program runs; a second SIGINT interrupts
    Python. If an exception ends the block, the deferred signals are dropped. Only the main thread receives signals: in
    another one, nothing is deferred.
    """
    received: list[int] = []

    def handle(number, frame):
        if number == signal.SIGINT and received:
            raise KeyboardInterrupt
        received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    with _answered():
        handlers = {number: signal.signal(number, handle) for number in SIGNALS}
        try:
            yield received
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler or signal.SIG_DFL)
    if received:
        signal.raise_signal(received[0])

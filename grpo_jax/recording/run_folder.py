"""The folder of a run: what is recorded, the run's description, one process that writes, signals that wait for it."""

import contextlib
import dataclasses
import fcntl
import importlib.util
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

import jax

from grpo_jax.config import Config
from grpo_jax.environments.suites import SUITES
from grpo_jax.errors import ConfigError
from grpo_jax.importing import import_custom, is_custom
from grpo_jax.recording.files import as_path, plain
from grpo_jax.recording.identity import identity
from grpo_jax.recording.metrics_file import METRICS_FILE
from grpo_jax.runs.programs import compiling
from grpo_jax.runs.run_spec import RunSpec, Setting

SUMMARY_FILE = "summary.json"
CHECKPOINTS = "checkpoints"
_locks: dict[Path, TextIO] = {}
"""Of each folder that this process has locked, the open file."""


def describe_run(spec: RunSpec, setting: Setting | None = None) -> dict[str, Any]:
    """Everything that the numbers of a run, or of one of its settings, depend on, in JSON's types.

    To resume a run, only its budgets may be larger.
    """
    hyperparams = vars(spec.hyperparams) | dict(setting.values if setting else {})
    described = {"run": spec.setting, "config": describe(spec.config), "hyperparams": hyperparams}
    return plain(described | {"keys": jax.random.key_data(spec.keys), "env_params": spec.env_params})


def describe(config: Config) -> dict[str, Any]:
    """The fields of a config as far as two processes can compare them (`identity`), also what import paths lead to."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for name, value in fields.items():
        is_path = isinstance(value, str) and is_custom(value) and value.partition(":")[0] not in SUITES
        found = identity(import_custom(value, name) if is_path else value)
        fields[name] = {"path": value} | found if is_path and isinstance(found, dict) else found
    return fields | {"env_params": identity(dict(config.env_params))}


@dataclasses.dataclass
class Recording:
    """What is recorded of a run, and where; flags of the commands that train."""

    out: Path | str
    """Folder for the results, created if it does not exist. It is locked until the process ends."""
    checkpoint_every: int | None = None
    """Iterations between two checkpoints, from which a run can be resumed; 0 for none. By default one each minute."""
    resume: bool = False
    """Resume the run in the folder, or begin it if there is none. The other arguments must be the same; the budget
    (total_steps, num_iterations or max_episodes) may be larger, also after the run's end."""
    policies: bool = True
    """Keep the latest and the best policy of each seed, in policies/."""
    tensorboard: bool = False
    """Also write TensorBoard's event files."""
    wandb: Literal["offline", "online"] | None = None
    """Also log to Weights & Biases, a run for each setting."""
    wandb_group: str | None = None
    """Name of the group of these runs in Weights & Biases; by default, of several settings, the name of the folder."""

    def __post_init__(self):
        """Takes ~ for the home folder."""
        self.out = as_path(self.out)

    def check(self) -> None:
        """Raises ConfigError for fields that contradict each other or need a package that is not installed."""
        if (self.checkpoint_every or 0) < 0:
            raise ConfigError(f"checkpoint_every={self.checkpoint_every} is negative; use 0 for no checkpoints")
        if self.resume and self.checkpoint_every == 0:
            raise ConfigError("resume=True needs checkpoints, and checkpoint_every=0 makes none; leave one of them out")
        if self.wandb is not None and importlib.util.find_spec("wandb") is None:
            raise ConfigError("wandb is not installed: pip install wandb, or do without it")


def prepare_folder(directory: Path, specs: Sequence[RunSpec], *, resume: bool, subfolder: str = "") -> None:
    """Makes the folder of these runs, which perhaps are recorded in a subfolder, and locks it until the process ends.

    Several runs of the process may share it.

    Raises:
      FileExistsError: the folder contains results that cannot be resumed, or another process writes to it.
      ConfigError: with `resume`, it contains another run.
      OSError: the folder cannot be made or written to.
    """
    directory = Path(os.path.realpath(directory))
    checkpoints = directory / subfolder / CHECKPOINTS
    folders = {*os.listdir(checkpoints)} if os.path.isdir(checkpoints) else set()
    is_saved = any(os.listdir(checkpoints / folder) for folder in folders if os.path.isdir(checkpoints / folder))
    files = (directory / name for name in (SUMMARY_FILE, METRICS_FILE))
    results = [file.name for file in files if os.path.exists(file) and file.stat().st_size]
    if (results or is_saved) and not (folders and resume):
        more = "; or go on with it (resume=True, --resume)" if folders else ": without checkpoints it cannot be resumed"
        raise FileExistsError(
            f"{directory} already holds a run ({[*results, CHECKPOINTS][0]}). Nothing was written. Choose another "
            f"folder, or move the old one away{more}."
        )
    expected = {spec.setting.folder for spec in specs}
    for folder in sorted(folders - expected) if results or is_saved else ():
        raise ConfigError(
            f"{directory} holds the run {folder!r}, which is none of {', '.join(map(repr, sorted(expected)))}; to "
            "resume, use what it was started with, also rows_at_once, or choose another folder for a new run"
        )
    file, lock = _locks.get(directory), directory / ".lock"
    if file is None or not (lock.exists() and os.path.samestat(lock.stat(), os.fstat(file.fileno()))):
        _lock(directory)  # for the first time, or again, as the folder was removed since


def _lock(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / ".lock").open("a")
    except OSError as error:
        reason = f"cannot be written to: {error.strerror}"
        raise OSError(f"{directory} {reason}. Choose another folder.") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FileExistsError(f"another process is writing to {directory}. Wait for it, or end it first.") from None
    except OSError:
        pass  # a file system without locks
    _locks[directory] = file


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

    A second SIGINT interrupts, and one while a run is compiled. Python notices signals once XLA has returned. If an
    exception ends the block, the deferred signals are dropped. Only the main thread receives signals: in another one,
    nothing is deferred.
    """
    received: list[int] = []

    def handle(number, frame):
        if number == signal.SIGINT and (received or compiling.is_set()):
            raise KeyboardInterrupt
        received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    handlers = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
    if received:
        signal.raise_signal(received[0])

"""What every command needs: errors, devices and the console."""

import contextlib
import dataclasses
import datetime
import errno
import functools
import gc
import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from rich.console import Console

from grpo_jax.commands.harness.parsing import invocation, peek
from grpo_jax.devices.mesh import ENVS, MODEL, ROWS
from grpo_jax.errors import ConfigError, HostError
from grpo_jax.recording.config_file import NotTrustedError
from grpo_jax.recording.run_folder import StopSignal
from grpo_jax.runs.processes import is_process_zero
from grpo_jax.runs.programs import compiling, keep_programs

# None: raised by this library. An error with the name of a file is one of the disk too.
DISK_ERRORS = {None, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}

PATIENT = " ".join(f"--xla_cpu_collective_call_{event}_timeout_seconds=86400" for event in ("warn_stuck", "terminate"))
"""XLA ends a process if one device of a CPU waits 40 seconds for another, as the one whose seeds have ended does."""


def command(main: Callable[[], None]) -> None:
    """Runs a command on all cores, with the programs that earlier ones have compiled.

    Wrong arguments, too little memory and a disk that cannot be written to are reported in one line.
    """
    # By default a CPU is one device, and one program seldom keeps more than one of its cores busy.
    if jax.config.jax_num_cpu_devices < 0:
        jax.config.update("jax_num_cpu_devices", num_cores())
    # A batched LAPACK call, such as brax's, waits for threads of the pool that it runs on. By default this has a thread
    # for each core, and the program hangs if all of them wait: it needs more threads than there are such calls.
    os.environ.setdefault("NPROC", str(max(16, 4 * num_cores())))
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if PATIENT not in flags and flags[:1] in ("", "-"):  # what does not begin with - is the name of a file of flags
        os.environ["XLA_FLAGS"] = f"{PATIENT} {flags}".strip()  # of a flag that is given twice, the last counts
    for stream in (sys.stdout, sys.stderr):  # texts that the console cannot show are no reason to end
        with contextlib.suppress(AttributeError):  # a notebook's
            stream.reconfigure(errors="backslashreplace")
    try:
        join_processes()
        answer_interrupts()
        keep_programs()
        gc.set_threshold(20_000)  # by default a start takes 0.4 s longer for collections, of `lm` 0.8 s
        main()
    except StopSignal as stop:
        if is_process_zero():
            can_resume = any(stop.folder.glob("**/checkpoints"))
            more = f". To go on:\n{resuming_command(stop.folder)}" if can_resume else f" in {stop.folder}, for good"
            print(f"{stop.name}: saved{more}", file=sys.stderr)
        raise
    except BrokenPipeError:  # what reads the output, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except (ConfigError, MemoryError, OSError, jax.errors.JaxRuntimeError) as error:
        said = describe_error(error)
        if not said:
            raise
        if isinstance(error, HostError):  # where it is, in the user's own code
            traceback.print_exception(error.__cause__)
        print(f"error: {said}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def describe_error(error: Exception) -> str:
    """What a user can mend, in one line; empty for a fault of ours."""
    text = str(error)
    if isinstance(error, NotTrustedError):
        return f"{text}: {shlex.join([*invocation().split(), *sys.argv[1:], '--trust'])}"
    if isinstance(error, jax.errors.JaxRuntimeError):
        is_memory = "RESOURCE_EXHAUSTED" in text
        return f"not enough memory: {text.splitlines()[0]}; use smaller numbers" if is_memory else ""
    if isinstance(error, OSError):
        return text if error.errno in DISK_ERRORS or error.filename is not None else ""
    return text or "not enough memory; use smaller numbers"


@functools.cache
def answer_interrupts() -> None:
    """Ctrl-C ends the process at once while a run is compiled, by a thread: Python waits until XLA returns."""
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    signal.set_wakeup_fd(sender, warn_on_full_buffer=False)

    def watch() -> None:
        while number := os.read(receiver, 1):
            if number[0] == signal.SIGINT and compiling.is_set():
                Console().show_cursor()
                print("\nstopped while compiling: nothing new has been trained", file=sys.stderr, flush=True)
                os._exit(128 + signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()


def resuming_command(out: Path) -> str:
    """The command line of this process, with which it goes on from a folder."""
    words, given = invocation().split(), iter(sys.argv[1:])
    for word in given:
        if word == "--out":
            next(given, None)
        elif word != "--resume" and not word.startswith("--out="):
            words.append(word)
    return shlex.join([*words, "--out", str(out), "--resume"])


def new_folder(name: str) -> Path:
    """The folder for results if --out is left out."""
    return Path("runs") / f"{name}_{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}"


def make_console(*, width: int = 1000, quiet: bool = False, stderr: bool = False) -> Console:
    """A console that prints brackets and colons as they are; `width` is that of files and pipes.

    With a --format it is standard error, so that a file of standard output has the table alone.
    Print lines that contain a path with `soft_wrap`, so that the path can be copied.
    """
    width = None if sys.stdout.isatty() else width
    return Console(width=width, quiet=quiet, stderr=stderr, markup=False, emoji=False, highlight=False)


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclasses.dataclass(kw_only=True)
class DeviceArguments:
    """One process, or several that are started with the same command line but for --process-id."""

    mesh: tuple[str, ...] = ()
    """Axes of the devices: seeds=4, envs=8 or model=2, or several; by default all for the seeds."""
    coordinator: str | None = None
    """Address of the first of several processes, host:port; or auto (SLURM, MPI, GKE, TPU)."""
    num_processes: int | None = None
    """Number of processes; needed unless the coordinator is auto."""
    process_id: int | None = None
    """Number of this process, from 0; needed unless the coordinator is auto. Process 0 alone writes and prints."""


def join_processes(flags: Sequence[str] | None = None) -> None:
    """Connects to the other processes of the run, if the flags (by default those of the command line) name any.

    This must come before anything that asks JAX for its devices, and so before the other flags are checked.

    Raises ConfigError if flags are missing or contradict each other, or no scheduler is found.
    """
    arguments = peek(DeviceArguments, flags)
    address, count, number = arguments.coordinator, arguments.num_processes, arguments.process_id
    jax.config.update("jax_enable_preemption_service", False)  # it would handle SIGTERM in our place
    if address == "auto":
        try:
            jax.distributed.initialize()
        except ValueError as error:
            raise ConfigError(f"--coordinator auto finds no scheduler it knows ({error}); use host:port") from error
    elif address is not None or count is not None or number is not None:
        if None in (address, count, number) or not 0 <= number < count:
            raise ConfigError(
                f"--coordinator {address} --num-processes {count} --process-id {number} is incomplete: use all "
                "three: host:port of the first process, the number of processes, and the number of this one, from 0; "
                "or --coordinator auto with a scheduler such as SLURM"
            )
        port = address.rpartition(":")[2] if ":" in address else ""
        if not (port.isdecimal() and 0 < int(port) < 2**16):  # a process that connects to another port would crash
            raise ConfigError(f"--coordinator {address} is no address; write host:port, such as 10.0.0.1:1234")
        try:
            jax.distributed.initialize(address, count, number)
        except RuntimeError as error:
            raise ConfigError(f"--coordinator {address} cannot be joined: {error}") from error
    if jax.distributed.is_initialized():
        # Programs that communicate must run in the same order in every process, and a CPU may run several at once.
        jax.config.update("jax_cpu_enable_async_dispatch", False)


def mesh_sizes(sizes: Sequence[str], flag: str) -> dict[str, int]:
    """The devices along each axis, of sizes such as seeds=4, envs=8 and model=2; raises ConfigError for others."""
    pairs = dict(size.partition("=")[::2] for size in sizes)
    known = len(pairs) == len(sizes) and pairs.keys() <= {ROWS, ENVS, MODEL}
    if not known or not all(size.isdecimal() and int(size) for size in pairs.values()):
        layout = " ".join(sizes)
        raise ConfigError(f"{flag} {layout} is no layout of devices; use seeds=4, envs=8 or model=2, or several")
    return {axis: int(size) for axis, size in pairs.items()}

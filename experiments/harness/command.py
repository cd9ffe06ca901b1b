"""What makes an experiment a command: its errors, its cores, and what it ran on."""

import dataclasses
import errno
import importlib.metadata
import os
import platform
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import tyro
from jax.sharding import Mesh

from grpo_jax.devices.mesh import ENVS, MODEL, ROWS, make_mesh
from grpo_jax.devices.processes import is_process_zero
from grpo_jax.errors import ConfigError
from grpo_jax.recording.files import given_back_if_unused, kept
from grpo_jax.recording.recorded_run import StopSignal

OF_THE_DISK = {None, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}  # None: said by our own code


OF_THE_DISK |= {errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG}  # no place for a file


PACKAGES = ("grpo-jax", "jax", "jaxlib", "flax", "optax", "gymnax", "numpy")


def command(main: Callable[[], None]) -> None:
    """Runs an experiment as a command, on all cores.

    A mistake in its arguments, too little memory and a disk that cannot be written to are one line, not a traceback.
    """
    # A CPU is one device unless told otherwise, and one program seldom keeps more than a core of it busy.
    if jax.config.jax_num_cpu_devices < 0:
        jax.config.update("jax_num_cpu_devices", num_cores())
    try:
        join_processes()
        with given_back_if_unused():
            main()
    except (ConfigError, FileExistsError, MemoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in OF_THE_DISK:
            raise
        there = kept()
        print(f"error: {error}" + (f". What was not written yet is lost; {there}" if there else ""), file=sys.stderr)
        sys.exit(2)
    except StopSignal as stop:
        if is_process_zero():
            print(stop.message, file=sys.stderr)
        raise
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def versions() -> dict[str, str]:
    """Of Python and of the packages that a result depends on."""

    def version(name: str) -> str:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}


def num_cores() -> int:
    """Of the host, that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hardware() -> str:
    """The accelerators JAX sees, and the host."""
    devices = jax.devices()
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    return f"{len(devices)} × {devices[0].device_kind}; host {cpu}, {os.cpu_count()} cores"


@dataclasses.dataclass(kw_only=True)
class DeviceArguments:
    """The devices of one process or of several, each started with the same command line but for its number."""

    mesh: tuple[str, ...] = ()
    """How the devices are laid out: seeds=4, envs=8 or model=2, or several; by default all over the seeds."""
    coordinator: str | None = None
    """Where the processes of a run on several hosts meet: host:port of the first, or auto (SLURM, MPI, GKE, TPU)."""
    num_processes: int | None = None
    """How many processes there are, if the coordinator is not auto."""
    process_id: int | None = None
    """Which of them this is, from 0, if the coordinator is not auto. Process 0 alone writes and prints."""


def join_processes(flags: Sequence[str] | None = None) -> None:
    """Meets the other processes of the run, if the flags (by default the command line) say that there are any.

    It has to come before anything that asks JAX for its devices, hence before the other flags are checked.

    Raises:
      ConfigError: flags are missing or contradict each other, or no scheduler is found.
    """
    arguments, _ = tyro.cli(DeviceArguments, args=flags, return_unknown_args=True, add_help=False)
    address, count, number = arguments.coordinator, arguments.num_processes, arguments.process_id
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM, which is ours to wait for
    if address == "auto":
        try:
            jax.distributed.initialize()
        except ValueError as error:
            raise ConfigError(
                f"--coordinator auto finds no scheduler that it knows ({error}); use host:port"
            ) from error
    elif address is not None or count is not None or number is not None:
        if None in (address, count, number) or ":" not in address or not 0 <= number < count:
            raise ConfigError(
                f"--coordinator {address} --num-processes {count} --process-id {number} is no place to meet: use all "
                "three, host:port of the first process, how many there are, and which this is, from 0; or use "
                "--coordinator auto where a scheduler such as SLURM knows them"
            )
        jax.distributed.initialize(address, count, number)
    if jax.distributed.is_initialized():
        # Programs that communicate must run in the same order everywhere, and a CPU runs some of them at once.
        jax.config.update("jax_cpu_enable_async_dispatch", False)


def parse_mesh(sizes: Sequence[str]) -> Mesh | None:
    """The mesh of sizes such as seeds=4, envs=8 and model=2; None if there are none.

    Raises:
      ConfigError: for another axis, a size that is not a number, or more devices than there are.
    """
    pairs = dict(size.partition("=")[::2] for size in sizes)
    known = len(pairs) == len(sizes) and pairs.keys() <= {ROWS, ENVS, MODEL}
    if not known or not all(map(str.isdecimal, pairs.values())):
        layout = " ".join(sizes)
        raise ConfigError(f"--mesh {layout} is no layout of devices; use seeds=4, envs=8 or model=2, or several")
    return make_mesh(**{axis: int(size) for axis, size in pairs.items()}) if pairs else None

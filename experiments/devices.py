"""Which devices and which processes an experiment runs on, as flags."""

import dataclasses
from collections.abc import Sequence

import jax
import tyro
from jax.sharding import Mesh

from grpo_jax.errors import ConfigError
from grpo_jax.sharding import ENVS, MODEL, ROWS, make_mesh


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

"""What an H100 executes in a train step, counted without having one: `python -m experiments.compiled_programs`.

With `--execution-plan tpu` the memory that it needs on a TPU v5e.

XLA's runtime executes a list of *thunks*: kernels, copies, loops of thunks, and command buffers, which are launched as
one CUDA graph. No time follows from the counts (`experiments.gpu_hour` times). Needs: pip install '.[accelerators]'.
"""

import dataclasses
import glob
import importlib.util
import itertools
import math
import os
import re
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from rich.table import Table

from grpo_jax.commands.harness.command import command, make_console
from grpo_jax.commands.harness.limits import Count, OutFile
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.errors import ConfigError
from grpo_jax.recording.files import write_json

from .harness.provenance import provenance
from .harness.reference_implementations import Implementation, Size
from .harness.workloads import IMPLEMENTATIONS, make_implementation

# XLA records fewer operations in CUDA graphs for older versions of CUDA than 12.9, or if there is no version.
H100 = """
gpu_device_info {
  driver_version: "12.9.0" runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0"
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 clock_rate_ghz: 1.98
  shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448 l2_cache_size: 52428800
  memory_bandwidth: 3352000000000 device_memory_size: 84978434048 cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 patch: 0 } device_description_str: "NVIDIA H100 80GB HBM3"
"""
_THUNK = re.compile(r"(\s*)(\d+): (k\w+)")
_NOT_LAUNCHED = re.compile(r"k(Sequential|While|Conditional|DynamicSlice\w*|(Wait|Async|Group|Host)\w*|\w+Done)$")
_NAMED = re.compile(r'profile_annotation: "([^"]+)"\s+thunk_id: (\d+)')
_TRIPS = re.compile(r'%?([\w.\-]+) = .* while\(.*known_trip_count":\{"n":"(\d+)"')

Loops = tuple[tuple[str, int], ...]  # around a thunk, the outermost first: the name, the number of its iterations


class Event(NamedTuple):
    kind: str  # "kernel", "copy", "graph" or "wait"
    loops: Loops


@dataclasses.dataclass
class Arguments:
    """Compiles train steps for an H100 that is not there, and counts what it would execute."""

    environments: tuple[str, ...] = ("CartPole-v1",)
    """Names of environments."""
    num_envs: tuple[Count, ...] = (1024, 4096, 65536)
    """Parallel environments, one program each."""
    implementations: tuple[Literal[IMPLEMENTATIONS], ...] = ("plain PPO", "PPO", "GRPO")
    """Train steps to compile."""
    execution_plan: str = "hopper"
    """Layout of our programs: cpu, gpu, hopper; or tpu, which compiles for a TPU v5e, by libtpu, and counts memory."""
    out: OutFile | None = None
    """JSON file for the results."""


def main(arguments: Arguments) -> None:
    choose_backend()
    rows, sizes = [], map(Size, arguments.num_envs)
    for name, size, environment in itertools.product(arguments.implementations, sizes, arguments.environments):
        made = make_implementation(name, environment, size, execution_plan=arguments.execution_plan)
        row = {"implementation": name, "environment": f"{environment}, {size.num_envs:,}"}
        rows.append(row | (needed_on_tpu(made) if arguments.execution_plan == "tpu" else count(made, size)))
    table = Table(*(name.replace("_", " ") for name in rows[0]))
    for row in rows:
        table.add_row(*(value if isinstance(value, str) else f"{value:,.4g}" for value in row.values()))
    make_console().print(table)
    if arguments.out is not None:
        write_json(arguments.out, provenance() | {"arguments": dataclasses.asdict(arguments), "programs": rows})


def choose_backend() -> None:
    """JAX runs on the CPU where no accelerator is attached: called before plugins look for theirs, and fail."""
    attached = map(glob.glob, ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/accel*", "/dev/vfio/[0-9]*"))
    if not (any(attached) or jax.config.jax_platforms):
        jax.config.update("jax_platforms", "cpu")


def h100() -> Any:
    """A description of an H100, to compile for; raises ConfigError if its compiler is not installed."""
    if not (importlib.util.find_spec("jax_plugins") and importlib.util.find_spec("jax_plugins.xla_cuda12")):
        raise ConfigError("the compiler for an H100 is not installed; pip install '.[accelerators]'")
    return topologies.get_topology_desc("h100", "cuda", target_config=H100, topology="1x1x1").devices[0]


def v5e() -> Any:
    """A description of a TPU v5e, to compile for; raises ConfigError if its compiler is not installed."""
    if not importlib.util.find_spec("libtpu"):
        raise ConfigError("the compiler for a TPU is not installed; pip install libtpu")
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # of a cloud's machine
    return topologies.get_topology_desc("v5e:2x2", "tpu").devices[0]


def lower(implementation: Implementation, device: Any, platform: str) -> jax.stages.Lowered:
    """A train step for a device that is not there."""
    shapes, sharding = jax.eval_shape(implementation.init, jax.random.key(0)), SingleDeviceSharding(device)
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)
    return jax.jit(implementation.step, donate_argnums=0).trace(state).lower(lowering_platforms=(platform,))


def needed_on_tpu(implementation: Implementation) -> dict[str, float]:
    """The memory that a train step needs on a TPU v5e, of which its temporary arrays, and seconds to compile."""
    started = time.perf_counter()
    needed = lower(implementation, v5e(), "tpu").compile().memory_analysis()
    return {
        "mebibytes": (needed.argument_size_in_bytes + needed.temp_size_in_bytes) / 2**20,
        "temporary": needed.temp_size_in_bytes / 2**20,
        "compile_seconds": time.perf_counter() - started,
    }


def count(implementation: Implementation, size: Size) -> dict[str, Any]:
    """Compiles a train step for an H100; returns its launches, graphs, waits, memory, and seconds to compile."""
    started = time.perf_counter()
    lowered = lower(implementation, h100(), "cuda")
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        try:
            compiled = lowered.compile(dump)
        except jax.errors.JaxRuntimeError:  # without a device, XLA finds no tiles for some products in Triton
            compiled = lowered.compile(dump | {"xla_gpu_enable_triton_gemm": False})
        dumped = ("sequence_after_thunk_passes", "metadata")  # of each the largest, as small programs have theirs too
        files = (map(Path.read_text, Path(folder).glob(f"*.thunk_{name}.txt")) for name in dumped)
        thunks, metadata = (max(texts, key=len) for texts in files)
    events, needed = read_events(compiled.as_text(), thunks, metadata), compiled.memory_analysis()
    return launches(events, size.num_steps, size.num_gradient_steps) | {
        "mebibytes": (needed.argument_size_in_bytes + needed.temp_size_in_bytes) / 2**20,
        "compile_seconds": time.perf_counter() - started,
    }


@dataclasses.dataclass
class _Scope:
    indent: int = -1
    loops: Loops = ()
    in_graph: bool = False
    skips_condition: bool = False  # a loop of known length, whose condition XLA does not execute
    in_condition: bool = False


def read_events(program: str, thunks: str, metadata: str) -> list[Event]:
    """What the runtime does, from the texts of a program, of its thunks, and of the instructions that these execute.

    The host waits before each iteration of a loop of unknown length, of which one is counted, and at a branch, unless
    these are in a graph. All sides of a branch are counted.
    """
    names = {int(number): name for name, number in _NAMED.findall(metadata)}
    trips = {name: int(number) for name, number in _TRIPS.findall(program)}
    events, scopes, loop = [], [_Scope()], _Scope()
    for line in thunks.splitlines():
        if line.strip() in ("condition:", "body:"):
            loop.in_condition = line.strip() == "condition:"
        if not (match := _THUNK.match(line)):
            continue
        indent, number, kind = len(match[1]), int(match[2]), match[3]
        while scopes[-1].indent >= indent:
            scopes.pop()
        outer = scopes[-1]
        if outer.skips_condition and outer.in_condition:
            continue
        scopes.append(scope := _Scope(indent, outer.loops, outer.in_graph))
        if kind == "kWhile":
            name = names.get(number, "")
            scope.loops, scope.skips_condition, loop = (*outer.loops, (name, trips.get(name, 1))), name in trips, scope
        waits = {"kWhile": 0 if scope.skips_condition else 2, "kConditional": 1}.get(kind, 0)
        events += [Event("wait", outer.loops)] * (0 if outer.in_graph else waits)
        if kind == "kCommandBuffer":
            events += [] if outer.in_graph else [Event("graph", outer.loops)]
            scope.in_graph = True
        elif not _NOT_LAUNCHED.match(kind):
            events.append(Event("copy" if kind == "kCopy" else "kernel", outer.loops))
    return events


def launches(events: list[Event], num_steps: int, num_gradient_steps: int) -> dict[str, Any]:
    """Kernels and copies of a train step, of each environment step and gradient step (NaN: no such loop); its waits.

    The rollout is the first loop whose iterations divide the environment steps, as one may make several; the loop over
    gradient steps is the last that has, with the loops around it, as many iterations.
    """
    launched = [event for event in events if event.kind in ("kernel", "copy")]
    paths = list(dict.fromkeys(event.loops[:depth] for event in launched for depth in range(1, len(event.loops) + 1)))
    rollout = next((path for path in paths if path[-1][1] > 1 and num_steps % iterations(path) == 0), None)
    gradient = next((path for path in paths[::-1] if iterations(path) == num_gradient_steps), None)

    def within(path: Loops | None, steps: int) -> float:
        return times(event for event in launched if event.loops[: len(path)] == path) / steps if path else math.nan

    return {
        "launches": times(launched),
        "each_step": within(rollout, num_steps),
        "each_gradient": within(gradient, num_gradient_steps),
        **{f"{kind}s": times(event for event in events if event.kind == kind) for kind in ("graph", "wait")},
    }


def iterations(loops: Loops) -> int:
    return math.prod(trips for _, trips in loops)


def times(events: Iterable[Event]) -> int:
    return sum(iterations(event.loops) for event in events)


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

"""Compiles train steps for devices that are not there, and reports what these would execute."""

import glob
import math
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from grpo_jax.devices.mesh import ROWS, make_mesh, over_rows, replicated, state_shardings

from . import hlo
from .gpu_program import Costs, read_events
from .implementations import Workload, make_workload
from .targets import Target

PHASES = ("rollout", "gradient", "rest")

USABLE_MEMORY = 0.9
"""The share of a device's memory that programs may use."""

TRITON = "xla_gpu_enable_triton_gemm"
"""XLA's option for matrix products in Triton instead of cuBLAS."""

# The device files; the second of NVIDIA's is that under WSL.
_GPUS, _TPUS = ("/dev/nvidia[0-9]*", "/dev/dxg"), ("/dev/accel*", "/dev/vfio/[0-9]*")
_TPU_WITHOUT_DEVICE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class Case(NamedTuple):
    name: str
    environment: str
    num_envs: int
    num_seeds: int
    mesh: dict[str, int]  # devices along each axis; empty: one device
    shuffle_blocks: int = 1  # of ours


def choose_backend() -> bool:
    """Whether an accelerator is attached. Otherwise JAX runs on the CPU, and only compiles for others.

    To be called before JAX looks for its devices: the installed plugins would search for theirs and fail.
    """
    has_gpu, has_tpu = (any(map(glob.glob, patterns)) for patterns in (_GPUS, _TPUS))
    if not has_tpu:
        for name, value in _TPU_WITHOUT_DEVICE.items():
            os.environ.setdefault(name, value)
    if not (has_gpu or has_tpu or jax.config.jax_platforms):
        jax.config.update("jax_platforms", "cpu")
    return jax.default_backend() != "cpu"


def compile_case(case: Case, target: Target, plan: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Compiles the train step of a case for a target, and reports what the target would execute.

    Args:
      case: what to compile; reference implementations run on one device only.
      target: the device.
      plan: the execution plan of ours.
      options: options of XLA's compiler.

    Returns:
      The numbers of a row: launches and time on a GPU, collectives, memory in bytes, seconds of compilation.
    """
    workload = make_workload(case.name, case.environment, case.num_envs, plan, case.shuffle_blocks)
    init, step = workload.implementation
    mesh = make_mesh(**{ROWS: 1} | case.mesh, devices=target.devices(math.prod(case.mesh.values())))
    if case.mesh or case.num_seeds > 1:
        state = jax.eval_shape(jax.vmap(init), jax.random.split(jax.random.key(0), case.num_seeds))
        step = over_rows(step, mesh)
    else:
        state = jax.eval_shape(init, jax.random.key(0))
    layout = state_shardings(mesh, state) if case.mesh else replicated(mesh)
    jitted = jax.jit(step, donate_argnums=0, in_shardings=(layout,), out_shardings=(layout, replicated(mesh)))
    started = time.perf_counter()
    lowered = jitted.trace(state).lower(lowering_platforms=(target.platform,))
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True} if target.is_gpu else {}
        try:
            compiled = lowered.compile(dump | dict(options))
        except jax.errors.JaxRuntimeError:
            if not target.is_gpu or TRITON in options:
                raise
            # Without a device, XLA finds no tiles for some products in Triton, and does not try cuBLAS by itself.
            options = {**options, TRITON: False}
            compiled = lowered.compile(dump | options)
        seconds = time.perf_counter() - started
        thunks, metadata = (_largest(Path(folder), name) for name in ("sequence_after_thunk_passes", "metadata"))
    numbers = _memory(compiled) | _report(compiled, thunks, metadata, workload, target)
    return numbers | {"options": options, "compile_seconds": seconds}


def _largest(folder: Path, name: str) -> str:
    """The largest of the files that XLA dumps under this name: small programs have theirs too."""
    return max((path.read_text() for path in folder.glob(f"*.thunk_{name}.txt")), key=len, default="")


def _memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    needed = compiled.memory_analysis()
    result = needed.output_size_in_bytes - needed.alias_size_in_bytes
    return {
        "argument_bytes": needed.argument_size_in_bytes,
        "temporary_bytes": needed.temp_size_in_bytes,
        "total_bytes": needed.argument_size_in_bytes + needed.temp_size_in_bytes + result,
    }


def _report(
    compiled: jax.stages.Compiled, thunks: str, metadata: str, workload: Workload, target: Target
) -> dict[str, Any]:
    """Counts of one train step, by phase where that tells something."""
    program = hlo.parse(compiled.as_text())
    phases = hlo.find_phases(program, workload.num_steps, workload.num_gradient_steps)
    collectives = hlo.read_collectives(program)
    report = {
        "num_steps": workload.num_steps,
        "num_gradient_steps": workload.num_gradient_steps,
        "has_rollout_loop": phases.rollout is not None,
        "has_gradient_loop": phases.gradient is not None,
        "collectives": {
            phase: sum(one.times for one in collectives if phases.of(one.path) == phase) for phase in PHASES
        },
        "communicated_bytes": sum(one.times * one.bytes for one in collectives),
        "bytes_accessed": None,
    }
    if not target.is_gpu:
        return report | {"bytes_accessed": (compiled.cost_analysis() or {}).get("bytes accessed")}
    events = read_events(program, thunks, metadata)
    launches = [event for event in events if event.kind in ("kernel", "copy")]

    def count(kind):
        return sum(event.times for event in events if event.kind == kind)

    return report | {
        "launches": sum(event.times for event in launches),
        "launches_by_phase": {
            phase: sum(event.times for event in launches if phases.of(event.path) == phase) for phase in PHASES
        },
        "copies": count("copy"),
        "graphs": count("graph"),
        "waits": count("wait"),
        "bytes_accessed": sum(event.times * event.bytes for event in launches),
        "model_seconds": Costs(target.bandwidth).seconds(events),
    }


def what_fits(rows: list[dict[str, Any]], target: Target) -> list[dict[str, Any]]:
    """The largest environments × seeds of each implementation, by a line through the memory of two programs.

    These are its largest and its second largest; an implementation without two sizes, of which the larger takes more,
    is left out.
    """
    found = []
    compiled = [row for row in rows if "error" not in row]
    for name, mesh in dict.fromkeys((row["name"], tuple(row["mesh"].items())) for row in compiled):
        sizes = {
            row["num_envs"] * row["num_seeds"]: row["total_bytes"]
            for row in compiled
            if (row["name"], tuple(row["mesh"].items())) == (name, mesh)
        }
        if len(sizes) > 1:
            (small, low), (large, high) = sorted(sizes.items())[-2:]
            if low >= high:
                continue
            bytes_each = (high - low) / (large - small)
            most = int((USABLE_MEMORY * target.memory - high) / bytes_each) + large
            size = {"target": target.name, "environment": rows[0]["environment"], "name": name, "mesh": dict(mesh)}
            found.append(size | {"environments_times_seeds": most, "bytes_each": bytes_each})
    return found

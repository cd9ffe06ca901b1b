"""What an H100, an A100 or a TPU executes in a train step, without having one: `python -m experiments.accelerators`.

Compiles train steps ahead of time, and reads the compiled programs: kernels, CUDA graphs, waits of the host, traffic
and memory on a GPU; memory and communication on a TPU. Times are a model; where an accelerator is attached, they are
also measured. docs/accelerators.md shows how to read the table. Needs the extra: pip install '.[accelerators]'.
"""

import dataclasses
import datetime
import itertools
import math
import re
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.commands.harness.command import command, make_console, mesh_sizes, new_folder, provenance
from grpo_jax.commands.harness.limits import Count, NotNegative
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.devices.execution_plan import resolve_plan
from grpo_jax.devices.mesh import ROWS
from grpo_jax.errors import ConfigError
from grpo_jax.recording.files import write_json

from .compiled_programs.ahead_of_time import USABLE_MEMORY, Case, choose_backend, compile_case, what_fits
from .compiled_programs.gpu_program import SORT_KERNELS, Costs
from .compiled_programs.implementations import NAMES, REFERENCES, by_environment, make_workload
from .compiled_programs.program_tables import draw, fits_table, tables
from .compiled_programs.targets import TARGETS, Target
from .harness import reference_implementations as reference
from .harness.reference_implementations import Implementation
from .harness.workloads import make_case, measure

ONE_DEVICE, BASELINE = "1", "plain PPO"


@dataclasses.dataclass
class Arguments:
    """Compiles train steps for accelerators that are not there, and reports what they would execute."""

    targets: tuple[Literal[tuple(TARGETS)], ...] = ("h100",)
    """Devices to compile for."""
    environments: tuple[str, ...] = ("CartPole-v1", "Breakout-MinAtar")
    """Names of gymnax environments. Token tasks have their own."""
    num_envs: tuple[Count, ...] = (1024, 4096, 65536)
    """Parallel environments, one program each."""
    num_seeds: tuple[Count, ...] = (1,)
    """Independent runs in one program (vmap), one program each."""
    implementations: tuple[Literal[NAMES], ...] = ("plain PPO", "rejax PPO", "PPO", "GRPO")
    """Train steps to compile."""
    meshes: tuple[str, ...] = (ONE_DEVICE,)
    """Layouts of devices, one program each: 1 (one device), envs=8, seeds=8, or seeds=2,envs=4. The reference
    implementations run on one device only."""
    execution_plan: str | None = None
    """Layout of our program: cpu, gpu or tpu; by default that of the target."""
    shuffle_blocks: Count = 1
    """Blocks of environments that ours shuffles apart: with as many as devices along envs, samples stay on theirs."""
    options: tuple[str, ...] = ()
    """Options of XLA's compiler, NAME=VALUE each."""
    out: Path | None = None
    """New folder for summary.json and, of GPUs, launches.png; one under runs/ if left out."""
    repeats: Count = 7
    """Rounds of measurements, where an accelerator is attached."""
    seconds: NotNegative = 0.3
    """How long one measurement takes, at least."""
    profile: Path | None = None
    """Where an accelerator is attached: a folder for profiles of one train step each, for TensorBoard or XProf."""


def main(arguments: Arguments) -> None:
    console = make_console(width=160)
    has_device = choose_backend()
    options, meshes = check(arguments, has_device)
    names = reference.installed(arguments.implementations)
    if names != arguments.implementations:
        console.print("rejax is not installed (pip install '.[benchmark]'): it is left out.")
    now = datetime.datetime.now()
    out = arguments.out or new_folder("accelerators")
    summary = out / "summary.json"
    if summary.exists():
        raise FileExistsError(f"{summary} exists; choose another folder (--out), or move the old one away")
    out.mkdir(parents=True, exist_ok=True)
    results = provenance() | {
        "date": f"{now:%Y-%m-%d}",
        "arguments": dataclasses.asdict(arguments),
        "model": Costs._field_defaults | {"sort_kernels": SORT_KERNELS, "usable_memory": USABLE_MEMORY},
        "targets": {name: TARGETS[name]._asdict() for name in arguments.targets},
        "programs": [],
        "fits": [],
    }
    for target in (TARGETS[name] for name in arguments.targets):
        plan = arguments.execution_plan or target.backend
        for environment, here in by_environment(names, arguments.environments):
            rows = []
            for mesh, num_seeds, num_envs in itertools.product(meshes, arguments.num_seeds, arguments.num_envs):
                num_rows = num_seeds * mesh.get(ROWS, 1)
                compared = [name for name in here if not (mesh and name in REFERENCES)]
                blocks = arguments.shuffle_blocks
                cases = [Case(name, environment, num_envs, num_rows, mesh, blocks) for name in compared]
                new = compile_cases(cases, target, plan, options)
                if target.backend == jax.default_backend() and not mesh:
                    measure_cases(new, cases, plan, options, arguments)
                rows += new
                results["programs"] += new
                write_json(summary, results)  # after each size, so that an interruption keeps them
            results["fits"] += (fits := what_fits(rows, target))
            console.print(*tables(target, environment, rows), *([fits_table(fits)] if fits else []))
            for row in rows:
                if "error" in row:
                    console.print(f"{row['name']} does not compile for {target.name}: {row['error']}", soft_wrap=True)
    write_json(summary, results)
    if on_gpus := [row for row in results["programs"] if "launches" in row and not row["mesh"]]:
        draw(on_gpus, out / "launches.png")
    console.print(f"Results in {out}", soft_wrap=True)


def check(arguments: Arguments, has_device: bool) -> tuple[dict[str, Any], list[dict[str, int]]]:
    """The compiler's options, and the devices along the axes of each mesh.

    Raises ConfigError if an argument is wrong.
    """
    if arguments.profile is not None and not has_device:
        raise ConfigError("--profile needs an accelerator, but none is attached; leave it out")
    if arguments.execution_plan is not None:
        resolve_plan(arguments.execution_plan)
    options = {}
    for option in arguments.options:
        name, _, value = option.partition("=")
        if not (name and value):
            raise ConfigError(f"--options {option} has no name or no value; write NAME=VALUE")
        options[name] = value == "true" if value in ("true", "false") else value
    meshes = [{} if mesh == ONE_DEVICE else mesh_sizes(mesh.split(","), "--meshes") for mesh in arguments.meshes]
    for name, mesh in itertools.product(arguments.targets, meshes):
        TARGETS[name].devices(math.prod(mesh.values()))
    return options, meshes


def compile_cases(cases: list[Case], target: Target, plan: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each case; if it cannot be built or compiled, with the error, not numbers."""
    rows = []
    for case in cases:
        row = {"target": target.name} | case._asdict()
        try:
            row |= compile_case(case, target, plan, options)
        except (ConfigError, jax.errors.JaxRuntimeError) as error:
            row["error"] = str(error).partition("\n")[0]
        rows.append(row)
    baseline = next((row["model_seconds"] for row in rows if row["name"] == BASELINE and "model_seconds" in row), None)
    for row in rows:
        if baseline is not None and "model_seconds" in row:
            row["model_ratio"] = row["model_seconds"] / baseline
    return rows


def measure_cases(
    rows: list[dict[str, Any]], cases: list[Case], plan: str, options: dict[str, Any], arguments: Arguments
) -> None:
    """Adds the measured seconds of a train step on the attached accelerator to the rows, and profiles the steps.

    Rows with an error are left out.
    """
    programs, measured_rows = [], [row for row in rows if "error" not in row]
    for row, case in zip(rows, cases, strict=True):
        if "error" in row:
            continue
        workload = make_workload(case.name, case.environment, case.num_envs, plan, case.shuffle_blocks)
        implementation, key = workload.implementation, jax.random.key(0)
        if case.num_seeds > 1:
            implementation, key = Implementation(*map(jax.vmap, implementation)), jax.random.split(key, case.num_seeds)
        num_samples = case.num_envs * case.num_seeds * workload.num_steps
        programs.append(make_case(case.name, implementation, key, num_samples, options=options))
        if arguments.profile is not None:
            folder = re.sub(r"\W+", "_", f"{case.name} {case.environment} {case.num_envs} {case.num_seeds}")
            with jax.profiler.trace(arguments.profile / folder):
                jax.block_until_ready(programs[-1].program(programs[-1].state, None, jnp.int32(0)))
    for row, measured in zip(measured_rows, measure(programs, arguments.repeats, arguments.seconds), strict=True):
        row["measured_seconds"] = float(np.median(measured["seconds_per_train_step"]))


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

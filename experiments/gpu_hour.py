"""What one GPU is to be measured for, nine minutes at a time: `python -m experiments.gpu_hour`.

What decides most comes first. Each piece is a process, so that an error of the GPU ends one alone. It compiles its
programs side by side, then times each by itself. Each result is a line of results.jsonl at once. Given again with the
folder, the command measures what has no line of this device. README.md there is made from all lines.
"""

import collections
import contextlib
import dataclasses
import json
import multiprocessing
import os
import subprocess
import sys
import time
import unittest.mock
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import jax

from grpo_jax.commands.harness.command import command, new_folder
from grpo_jax.commands.harness.limits import NotNegative
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.devices.execution_plan import PLANS, ExecutionPlan, resolve_plan
from grpo_jax.recording.files import json_lines, read_json

from . import brax_speed, token_speed
from .harness import cold_start, device_agreement, workloads
from .harness.gpu_page import RESULTS, cell, write_page
from .harness.provenance import commit
from .harness.reference_implementations import Size, installed
from .harness.summaries import chosen

LONGEST, TIMING = 240.0, 20.0  # seconds of a piece, and those at its end in which nothing new is compiled
OURS = [f"{algorithm}, {plan}" for algorithm in ("PPO", "GRPO") for plan in device_agreement.PLANS_OF_A_GPU]
ALL = [*OURS, *installed(("rejax PPO", "plain PPO"))]
SHAPES = {  # the environment, the sizes of a train step, and the seeds
    "2,048 environments": ("CartPole-v1", Size(2048), 1),
    "65,536 environments": ("CartPole-v1", Size(65536), 1),
    "2,048 seeds of 4 environments": ("CartPole-v1", Size(4), 2048),
    "4 environments": ("CartPole-v1", Size(4), 1),
    "64 environments": ("CartPole-v1", Size(64), 1),
    "Breakout, 4,096 environments": ("Breakout-MinAtar", Size(4096), 1),
    "Asterix, 2,048 environments": ("Asterix-MinAtar", Size(2048), 1),
    "Seaquest, 2,048 environments": ("Seaquest-MinAtar", Size(2048), 1),
    "Craftax-Symbolic, 1,024 environments": ("craftax:Craftax-Symbolic-v1", Size(1024, 64, 4, 8, (512, 512)), 1),
}
CHOICES: dict[str, dict[str, Any]] = {  # what the plan of a device might be: its fields
    "as it is": {},
    "steps_per_loop 1": {"steps_per_loop": 1},  # also without what else an iteration of several steps has
    "steps_per_loop 8": {"steps_per_loop": 8},
    "value_passes 0": {"value_passes": 0},
    "num_reset_draws 8": {"num_reset_draws": 8},
    "samples_per_part 2^18": {"samples_per_part": 2**18},
    "minibatches_ahead off": {"minibatches_ahead": False},
    "skips_empty_parts": {"skips_empty_parts": True},
}
barrier = jax.lax.optimization_barrier


def outside_of_rollouts(tree: Any) -> Any:
    """A barrier, but where a rollout calls it."""
    return tree if sys._getframe(1).f_code.co_filename.endswith("rollout.py") else barrier(tree)


PATCHES: dict[str, dict[str, Any]] = {  # what no field turns off: what stands in for names
    "records not packed": dict.fromkeys((f"grpo_jax.rollouts.scan.{x}pack" for x in ("", "un")), lambda tree: tree),
    "no barrier after a step": {"jax.lax.optimization_barrier": outside_of_rollouts},
    "start states for one step": {"grpo_jax.rollouts.resets.MAX_BYTES": 0},
    "no vector of the optimiser": {"grpo_jax.updates.optimizers.MAX_FLAT_PARAMETERS": 0},
}


class Run(NamedTuple):
    """What a process measures."""

    piece: str
    names: list[str]
    out: Path
    until: float  # of time.monotonic()
    smoke: bool
    where: dict[str, Any]  # the device, and what runs

    def keep(self, name: str, **values: Any) -> None:
        """Prints a result, and adds its line."""
        line = {"piece": self.piece, "name": name, **values}
        print(*(cell(value) for value in line.values()), sep=" | ", flush=True)
        with (self.out / RESULTS).open("a") as file:
            print(json.dumps(line | self.where), file=file)

    def made(self, make: Callable[[str], Any]) -> Iterator[tuple[str, Any]]:
        """The names, each with what a thread made for it, until little time is left; what fails has a line."""
        pool = ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0)) - 2))
        futures = {pool.submit(make, name): name for name in self.names}
        with contextlib.suppress(TimeoutError):
            for future in as_completed(futures, timeout=max(0.0, self.until - TIMING - time.monotonic())):
                if error := future.exception():
                    self.keep(futures[future], failed=f"{type(error).__name__}: {error}"[:500])
                else:
                    yield futures[future], future.result()
        pool.shutdown(wait=False, cancel_futures=True)


def agreement(run: Run) -> None:
    """Networks against float64, and train steps against a CPU's."""
    compare = device_agreement.network_errors if run.piece == "networks" else device_agreement.step_differences
    for name, values in run.made(compare):
        run.keep(name, **values)


def speed(run: Run) -> None:
    """Environment steps of training a second: all implementations of a shape in turns."""

    def make(name: str) -> workloads.Case:
        shape, implementation = name.split(": ")
        environment, size, num_seeds = SHAPES[shape]
        size, num_seeds = (Size(8, 8, 1, 2, (16,)), min(num_seeds, 2)) if run.smoke else (size, num_seeds)
        implementation, _, plan = implementation.partition(", ")
        plan = plan if plan in device_agreement.PLANS_OF_A_GPU else chosen_plan(plan)
        (case,) = workloads.make_cases((implementation,), environment, size, num_seeds, execution_plan=plan)
        workloads.step_once(case)
        return case._replace(name=name)

    shapes = collections.defaultdict(list)
    for name, case in run.made(make):
        shapes[name.partition(":")[0]].append(case)
    for cases in shapes.values():
        if time.monotonic() > run.until:
            return
        for case, row in zip(cases, workloads.measure(cases, *((1, 0.0) if run.smoke else (3, 0.2))), strict=True):
            fields = ("steps_per_second", "steps_per_second_low", "compile_seconds", "memory_bytes")
            profile = workloads.kernels_by_time(case) if run.piece == "first" and case.name.endswith(OURS[0]) else {}
            run.keep(case.name, **{field: row[field] for field in fields}, **profile)


def chosen_plan(name: str) -> ExecutionPlan:
    """The plan of this device with other fields; of a patch with one that has no effect, so that it is traced anew."""
    own, patches = PLANS["gpu"] if jax.default_backend() == "cpu" else resolve_plan("auto"), [*PATCHES]
    fields = {"steps_per_check": 1 + patches.index(name)} if name in patches else CHOICES.get(name, {})
    return dataclasses.replace(own, **fields)


def choices(run: Run) -> None:
    """Speed with other plans side by side, then with each patch by itself."""
    speed(run._replace(names=[name for name in run.names if name.partition(", ")[2] not in PATCHES]))
    for patch, stands_in in PATCHES.items():
        with contextlib.ExitStack() as stack:
            for target, value in stands_in.items():
                stack.enter_context(unittest.mock.patch(target, value))
            speed(run._replace(names=[name for name in run.names if name.endswith(patch)]))


def cold(run: Run) -> None:
    """Seconds from a new process to a solved CartPole."""
    task = cold_start.CARTPOLE._replace(solved=0.0) if run.smoke else cold_start.CARTPOLE
    for name in run.names:
        for row in cold_start.measure((name,), 1, task=task):
            run.keep(name, **{key: row[key] for key in ("cache", *task.stages, *cold_start.PROGRAMS)})


def study(run: Run) -> None:
    """The rows of a command that writes one file."""
    for name in run.names:
        module, flags, smaller = STUDIES[name]
        path = run.out / f"{run.piece}.json"
        module.main(parse_flags(module.Arguments, f"{flags} {smaller if run.smoke else ''} --out {path}".split()))
        for row in read_json(path)["results"]:
            fields = ("implementation", "steps_per_second", "compile_seconds", "memory_bytes")
            run.keep(name, **{field: row[field] for field in fields if field in row})


ANT = "--task ant --num-envs 4096 --num-steps 80 --num-minibatches 32 --hidden-sizes 256 256 --repeats 3"
LANGUAGE = "--sizes 30x576:256:49152 --num-heads 9 --compute-dtype bfloat16 --prompt-length 48 --num-envs 64"
SMALL = "--num-envs 8 --num-minibatches 2 --repeats 1"
STUDIES = {  # the module, its flags, and those of a smoke test, which win
    "ant": (brax_speed, ANT, f"--task fast {SMALL} --num-steps 8 --hidden-sizes 8 --iterations 2"),
    "language model": (token_speed, LANGUAGE, f"--sizes 1x8:4:16 --num-heads 1 --group-size 2 {SMALL} --seconds 0"),
}
PIECES = {  # in this order: what measures, and the names of its results
    "networks": (agreement, [*device_agreement.NETWORKS]),
    "first": (speed, [f"{shape}: {name}" for shape in [*SHAPES][:3] for name in ALL]),
    "choices": (choices, [f"{shape}: PPO, {name}" for shape in [*SHAPES][:3] for name in (*CHOICES, *PATCHES)]),
    "others": (speed, [f"{shape}: {name}" for shape in [*SHAPES][3:-1] for name in ALL]),
    "agreement": (agreement, [*device_agreement.CASES]),
    "cold": (cold, ["plain PPO", "PPO, tuned"]),
    "craftax": (speed, [f"{[*SHAPES][-1]}: {name}" for name in OURS]),
    "brax": (study, ["ant"]),
    "language": (study, ["language model"]),
}


@dataclasses.dataclass
class Arguments:
    """Measures one GPU, what decides most first; given again with its folder, it goes on."""

    pieces: tuple[str, ...] = ()
    """What to measure; by default all: networks, first, choices, others, agreement, cold, craftax, brax, language."""
    minutes: NotNegative = 8.0
    """After these nothing begins; what runs then is ended 40 seconds later."""
    smoke: bool = False
    """Everything as small as it goes and once, also without a GPU; into smoke/ of the folder."""
    out: Path | None = None
    """Folder for the results; a new one under runs/ if left out."""


def main(arguments: Arguments) -> None:
    until, pieces = time.monotonic() + 60 * arguments.minutes, chosen(PIECES, arguments.pieces, "piece")
    out = (arguments.out or new_folder("gpu_hour")) / ("smoke" if arguments.smoke else "")
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    words = [sys.executable, "-c", "import jax; print(jax.devices()[0].device_kind)"]  # here, JAX would keep the GPU
    device = subprocess.check_output(words, text=True).splitlines()[-1]
    where = {"device": device, "jax": jax.__version__, "commit": commit()}
    pieces = {piece: names[:1] if arguments.smoke else names for piece, (_, names) in pieces.items()}
    for piece, names in pieces.items():
        names = [name for name in names if (device, piece, name) not in measured(out)]
        if names and time.monotonic() < until:
            its_end = until if arguments.smoke else min(until, time.monotonic() + LONGEST)
            run = Run(piece, names, out, its_end, arguments.smoke, where)
            process = multiprocessing.get_context("spawn").Process(target=measure, args=(run,))
            process.start()
            process.join(run.until - time.monotonic() + 2 * TIMING)
            process.kill()
    write_page(out, "A smoke test, no measurement: " if arguments.smoke else "")
    left = [piece for piece, names in pieces.items() if {(device, piece, name) for name in names} - measured(out)]
    print(f"Results in {out}", f"left for another run with this --out: {', '.join(left)}" if left else "", sep="; ")


def measured(out: Path) -> set[tuple[str, str, str]]:
    return {(line["device"], line["piece"], line["name"]) for line in json_lines(out / RESULTS) if "failed" not in line}


def measure(run: Run) -> None:
    try:
        PIECES[run.piece][0](run)
    except Exception as error:
        run.keep(run.names[0], failed=f"{type(error).__name__}: {error}"[:500])
    os._exit(0)  # programs that are still compiled are not waited for


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

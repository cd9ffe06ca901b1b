"""Everything that is to be measured on one GPU, in about an hour: `python -m experiments.gpu_hour`.

Each measurement is a command of its own, in a process of its own, which takes a few minutes at most. What the folder
has is not measured again, so the command can be stopped at any time, and given again. README.md and a picture in the
folder are made from the results: training times beside those that others published, settings of XLA against each other,
and whether the GPU trains as a CPU does.
"""

import dataclasses
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from grpo_jax.commands.harness.command import command, make_console, new_folder
from grpo_jax.commands.harness.limits import NotNegative
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.recording.files import write_json

from .harness.gpu_page import DONE, is_measured, write_page
from .harness.published_speeds import SHAPES, Shape
from .harness.summaries import chosen

LONGEST = 240
"""Seconds after which a measurement is ended."""
SMALL = "--num-envs 8 --num-steps 8 --num-minibatches 2 --num-seeds 1 --hidden-sizes 8 --repeats 1 --seconds 0"
GRAPHS = "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL --xla_gpu_command_buffer_unroll_loops=true"


class Measurement(NamedTuple):
    flags: str  # of python -m; "{out}" is the measurement's folder
    smaller: str = ""  # flags of a smoke test, which win over the others
    variables: Mapping[str, str] = {}  # for the environment of the process

    def words(self, smoke: bool) -> list[str]:
        return shlex.split(f"{self.flags} {self.smaller}" if smoke else self.flags)


def speed(environment: str, sizes: str, implementations: Sequence[str], **variables: str) -> Measurement:
    """Steps per second, in turns; with settings of XLA or JAX from the environment of the process."""
    flags = f"experiments.benchmark --environments {environment} {sizes} --no-parts --out {{out}}/speed.json"
    smaller = f"{SMALL} --implementations PPO"
    return Measurement(f"{flags} --implementations {shlex.join(implementations)}", smaller, variables)


def of_shape(shape: Shape) -> Measurement:
    """All implementations at a published shape."""
    sizes = shape.size._asdict() | {"num_seeds": tuple(shape.published)}
    del sizes["learning_rate"]  # which changes no time
    values = {name: value if isinstance(value, tuple) else (value,) for name, value in sizes.items()}
    flags = (f"--{name.replace('_', '-')} {' '.join(map(str, value))}" for name, value in values.items())
    return speed(shape.environment, " ".join(flags), shape.implementations)


def language(dtype: str, precision: str) -> Measurement:
    """Generation and train steps of a transformer of SmolLM2-135M's size, in tokens per second."""
    words = f"experiments.token_speed --sizes 30x576:64:49152 --num-heads 9 --num-envs 64 --compute-dtype {dtype}"
    smaller = "--sizes 1x8:4:16 --num-heads 1 --num-envs 16 --repeats 1 --seconds 0"
    return Measurement(f"{words} --out {{out}}/tokens.json", smaller, {"JAX_DEFAULT_MATMUL_PRECISION": precision})


PIECES: dict[str, dict[str, Measurement]] = {
    "tests": {
        "all": Measurement(
            "pytest -q -n 0 -p no:cacheprovider --junitxml {out}/tests.xml tests/training/test_execution_plans.py "
            "tests/environments/test_lean.py tests/objectives/test_golden.py",
            "-k test_a_plan_is_found_by_name",
        )
    },
    "agreement": {
        "devices": Measurement("experiments.device_agreement --out {out}/agreement.json"),
    },
    "settings": {
        f"{name}-{short}": speed(environment, "--num-envs 4096", ("plain PPO", "PPO", "GRPO"), **variables)
        for short, environment in (("cartpole", "CartPole-v1"), ("breakout", "Breakout-MinAtar"))
        for name, variables in (
            ("defaults", {}),
            ("float32", {"JAX_DEFAULT_MATMUL_PRECISION": "float32"}),
            ("graphs", {"XLA_FLAGS": GRAPHS}),
        )
    },
    "shapes": {name: of_shape(shape) for name, shape in SHAPES.items()},
    "brax": {
        "ant": Measurement(
            "experiments.brax_speed --task ant --num-envs 4096 --num-steps 80 --num-epochs 4 --num-minibatches 32 "
            "--hidden-sizes 256 256 --iterations 2 --repeats 3 --out {out}/brax.json",
            "--task fast --num-envs 8 --num-steps 8 --num-minibatches 2 --hidden-sizes 8 --repeats 1",
        )
    },
    "language": {
        f"{dtype}-{precision}": language(dtype, precision)
        for dtype, precision in (("float32", "float32"), ("float32", "default"), ("bfloat16", "default"))
    },
}


@dataclasses.dataclass
class Arguments:
    """Measures everything that is to be measured on one GPU; given again, it goes on where it stopped."""

    pieces: tuple[str, ...] = ()
    """What to measure; by default all, in this order: tests, agreement, settings, shapes, brax, language."""
    minutes: NotNegative | None = None
    """No measurement begins that might not be over by then; by default all are made."""
    smoke: bool = False
    """Everything as small as it goes and once, also without a GPU; the first measurement of each piece. Its results
    are in smoke/ of the folder."""
    out: Path | None = None
    """Folder for the results; a new one under runs/ if left out."""


def main(arguments: Arguments) -> None:
    console, began = make_console(), time.monotonic()
    pieces = chosen(PIECES, arguments.pieces, "piece")
    out = arguments.out or new_folder("gpu_hour")
    out = out / "smoke" if arguments.smoke else out  # nothing there counts as measured
    device = attached_device()
    waiting = {
        f"{piece}/{name}": measurement
        for piece, measurements in pieces.items()
        for name, measurement in list(measurements.items())[: 1 if arguments.smoke else None]
        if not is_measured(out / piece / name)
    }
    for i, (name, measurement) in enumerate(waiting.items()):
        if arguments.minutes is not None and time.monotonic() - began + LONGEST > 60 * arguments.minutes:
            console.print(
                f"{len(waiting) - i} measurements are left; give the command again with --out {out}", soft_wrap=True
            )
            break
        console.print(f"{name} ({i + 1} of {len(waiting)})")
        if problem := measure(measurement, out / name, arguments.smoke):
            console.print(f"  failed: {problem}", soft_wrap=True)
    write_page(out, device, arguments.smoke)
    console.print(f"Results in {out}", soft_wrap=True)


def attached_device() -> str:
    """Its kind, by a process that is over before the first measurement: JAX takes a GPU's memory for itself."""
    words = [sys.executable, "-c", "import jax; print(jax.devices()[0].device_kind)"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()[-1]


def measure(measurement: Measurement, out: Path, smoke: bool) -> str:
    """Runs a measurement and notes that it is done; returns the last line of an error, and then nothing is noted."""
    shutil.rmtree(out, ignore_errors=True)  # the commands refuse to replace results
    out.mkdir(parents=True)
    words = ["-m", *measurement.words(smoke)]
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *(word.replace("{out}", str(out)) for word in words)],
            env=os.environ | measurement.variables,
            capture_output=True,
            text=True,
            timeout=LONGEST,
        )
    except subprocess.TimeoutExpired:
        return f"not over after {LONGEST} s"
    (out / "output.txt").write_text(done.stdout + done.stderr)
    if done.returncode:
        return (done.stderr or done.stdout).strip().rpartition("\n")[2]
    variables = [f"{name}={value}" for name, value in measurement.variables.items()]
    shown = shlex.join([*variables, "python", *words]).replace("{out}", "DIR")
    write_json(out / DONE, {"command": shown, "seconds": time.monotonic() - began})
    return ""


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

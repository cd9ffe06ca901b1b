"""`grpo-jax lm` beside TRL's GRPOTrainer on one core: `taskset -c 0 python -m experiments.beside_trl --model SmolLM2`.

The task `sentiment` of `experiments.pretrained`, the same reward and settings: LoRA of rank 8, 4 prompts of 8
completions. TRL has a Python of its own: python3 -m venv trl && trl/bin/pip install trl==1.16.0 peft. What is in the
folder is not run again.
"""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np

from grpo_jax.commands.harness.command import command
from grpo_jax.commands.harness.limits import Count, Seeds
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.language import load_model
from grpo_jax.recording.files import write_json

from .harness.pretrained_tasks import exact, sentiment
from .harness.summaries import write_markdown

OURS = "-m grpo_jax.commands.lm --reward experiments.harness.trl_training:counted --num-prompts 4 --group-size 8 "
OURS += "--lora-rank 8 --lora-alpha 16 --learning-rate 5e-4 --kl-coef 0 --score-ddof 1 --score-eps 1e-4 "
OURS += "--max-grad-norm 1 --adam-eps 1e-8 --sample-every 0"


@dataclasses.dataclass
class Arguments:
    """Trains a language model by grpo_jax and by TRL, and measures CPU seconds, memory and held-out accuracy."""

    model: Path
    """Folder of SmolLM2-135M-Instruct, or of another model."""
    trl: Path = Path("trl/bin/python")
    """The Python that has TRL."""
    max_completion: tuple[Count, ...] = (24, 96, 256)
    """Limits of a completion in tokens."""
    num_iterations: Count = 10
    """Iterations of a run."""
    num_seeds: Seeds = 3
    """Runs of each side at each limit."""
    out: Path = Path("runs/beside_trl")
    """Folder for the results."""


def main(arguments: Arguments) -> None:
    out, found = arguments.out.absolute(), {}
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", sentiment().prompts), ("held_out", sentiment().held_out)):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = itertools.product(arguments.max_completion, ("grpo_jax", "TRL"), range(arguments.num_seeds))
    for limit, side, seed in settings:
        if not (result := out / f"{side}_{limit}_{seed}.json").exists():
            write_json(result, train(side, limit, seed, arguments, result.with_suffix("")))
        found.setdefault((str(limit), side), []).append(json.loads(result.read_text()))
        header = ["limit", "", *found[str(limit), side][0]]
        rows = [[*run, *(spread([each[name] for each in of]) for name in header[2:])] for run, of in found.items()]
        write_markdown(out / "table.md", header, rows)
    print((out / "table.md").read_text())


def spread(values: list[float]) -> str:
    """The mean over seeds, and the range."""
    return f"{np.mean(values):.3g} [{min(values):.3g}, {max(values):.3g}]"


def train(side: str, limit: int, seed: int, arguments: Arguments, folder: Path) -> dict[str, float]:
    """What one run costs, and how many held-out prompts the model then answers rightly."""
    model, iterations, costs = arguments.model.absolute(), arguments.num_iterations, folder / "costs.jsonl"
    folder.mkdir(exist_ok=True)
    costs.unlink(missing_ok=True)
    if side == "TRL":
        module = "experiments.harness.trl_training"
        program = [arguments.trl.absolute(), "-m", module, model, folder, limit, seed, iterations]
    else:
        flags = {"model": model, "out": folder, "max-completion": limit, "seed": seed, "num-iterations": iterations}
        flags |= {"prompts": folder.parent / "train.jsonl", "held-out": folder.parent / "held_out.jsonl"}
        program = [sys.executable, *OURS.split(), *(f"--{name}={value}" for name, value in flags.items())]
    variables = {"COSTS": str(costs), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    begun = time.time()
    with open(folder / "console.txt", "w") as console:
        subprocess.run([*map(str, program)], env=os.environ | variables, check=True, stdout=console, stderr=console)
    lines = [json.loads(line) for line in costs.read_text().splitlines()]
    # From one call of the reward to the next is an update and a rollout. The first may be compiled in between.
    used = {"CPU s an iteration": float(np.median(np.diff([line["cpu"] for line in lines])[1:]))}
    used |= {"s to the first rewards": lines[0]["time"] - begun, "CPU s to the last rewards": lines[-1]["cpu"]}
    # One evaluator for both sides.
    trained, rows = load_model(folder / "adapter"), sentiment().held_out * 8
    texts = trained.complete([row["messages"] for row in rows], jax.random.key(0), max_completion=24)
    right = exact(texts, [row["answer"] for row in rows])
    return used | {"peak GiB": max(line["peak"] for line in lines), "right, sampled": float(np.mean(right))}


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

"""Whether an accelerator trains as a CPU does: `python -m experiments.device_agreement`.

A train step of a few algorithms runs on the CPU and on the attached accelerator, from the same state, with the
accelerator's execution plan and matrix products in float32. Sampled actions hang on the last bits of the logits: a few
may differ, and then so do the episodes that follow from them. What has to agree is what the step has learnt.
"""

import dataclasses

import jax
import numpy as np
from rich.table import Table

from grpo_jax import Config, Hyperparams, make_init, make_train_step
from grpo_jax.commands.harness.command import command, make_console
from grpo_jax.commands.harness.limits import OutFile
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.policies import MLP, Transformer
from grpo_jax.recording.files import write_json

from .harness.provenance import provenance

SIZE = {"num_envs": 16, "num_epochs": 2, "num_minibatches": 4}
CASES = {
    "PPO, CartPole": {"environment": "CartPole-v1", "algorithm": "ppo", "num_steps": 32},
    "GRPO, CartPole": {"environment": "CartPole-v1", "algorithm": "grpo", "group_size": 4},
    "PPO, Pendulum, GRU": {
        "environment": "Pendulum-v1",
        "algorithm": "ppo",
        "num_steps": 32,
        "network": MLP(recurrent="gru"),
    },
    "PPO, Breakout": {"environment": "Breakout-MinAtar", "algorithm": "ppo", "num_steps": 16},
    "GRPO, tokens": {
        "environment": "tokens:sort-1",  # so short that some of the first completions are right
        "algorithm": "grpo",
        "num_envs": 1024,
        "group_size": 4,
        "network": Transformer(width=32, num_layers=1, num_heads=2),
    },
}


@dataclasses.dataclass
class Arguments:
    """Compares train steps on the CPU with those on the attached accelerator."""

    out: OutFile | None = None
    """JSON file for the results."""


def main(arguments: Arguments) -> None:
    table, rows = Table("train step", "metrics differ by", "parameters differ by", "of a step of"), []
    for name, fields in CASES.items():
        rows.append({"case": name} | compare(Config(**SIZE | fields, execution_plan=jax.default_backend())))
        table.add_row(name, *(f"{rows[-1][field]:.1e}" for field in ("metrics", "parameters", "step")))
    console = make_console()
    console.print(table)
    if arguments.out is not None:
        write_json(arguments.out, provenance() | {"results": rows})
        console.print(f"Results in {arguments.out}", soft_wrap=True)


def compare(config: Config) -> dict[str, float]:
    """The largest relative difference of a metric, and differences of parameters: between devices, and by the step."""
    results = []
    for device in (jax.devices("cpu")[0], jax.devices()[0]):
        with jax.default_device(device), jax.default_matmul_precision("float32"):
            state = jax.jit(make_init(config))(jax.random.key(0), Hyperparams())
            after, metrics = jax.jit(make_train_step(config))(state)
            results.append(jax.device_get((state.params, after.params, metrics)))
    (start, there, expected), (_, here, metrics) = results
    return {
        "metrics": max(
            float(np.nanmax(np.abs(value - expected[name]) / (np.abs(expected[name]) + 1e-3), initial=0.0))
            for name, value in metrics.items()
        ),
        "parameters": largest_difference(here, there),
        "step": largest_difference(there, start),
    }


def largest_difference(tree, other) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True))


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

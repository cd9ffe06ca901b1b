"""GR2PO, which compares members of a group step by step, in control: `python -m experiments.per_step_groups`.

A step's return-to-go is relative to the group's mean at that step, with or without a division by the group's deviation
there. A group has one start, or is all parallel environments, each from a start of its own. Every method has the same
environment steps and the same trials: its learning rate is the best of four on seeds of its own.
"""

import dataclasses
import functools
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

from grpo_jax import GRPO, PPO, run, tuned
from grpo_jax.algorithms import GRPO_RETURN_TO_GO
from grpo_jax.commands.harness.command import command, make_console
from grpo_jax.commands.harness.limits import Seed, Seeds, Steps
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.groups import FRESH
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.objectives import group_normalized, returns_to_go
from grpo_jax.recording.figures import draw_curves
from grpo_jax.recording.statistics import Curve, learning_curve
from grpo_jax.sweeps.runs import score_summary
from grpo_jax.types import RolloutState, Trajectory

from .harness.summaries import TABLE, chosen, method_cells, read_results, write_results


def per_step_normalized(trajectory: Trajectory, hyperparams: Hyperparams, group_size: int) -> jax.Array:
    """`[T, B]`: the discounted return-to-go in deviations of the group's members that still play at this step.

        A_it = (R_it - mean_j R_jt) / (std_j R_jt + eps)

    GR2PO (https://arxiv.org/abs/2609.19850). 0 where no other member plays.
    """
    returns = returns_to_go(trajectory, hyperparams, group_size)
    shape = len(returns), -1, group_size
    return group_normalized(returns.reshape(shape), trajectory.valid.reshape(shape)).reshape(returns.shape)


def own_starts(simulator: Any, state: RolloutState, key: jax.Array, group_size: int) -> RolloutState:
    """Every environment starts from a reset of its own, whatever its group."""
    return simulator.reset(state.environment_params, key, state.num_envs)


OWN_STARTS = FRESH._replace(begin=own_starts)
GR2PO = GRPO._replace(advantage=per_step_normalized)
METHODS = {
    "PPO": PPO,
    "GRPO": GRPO,
    "return-to-go, one start": GRPO_RETURN_TO_GO,
    "return-to-go, all": GRPO_RETURN_TO_GO._replace(start=OWN_STARTS),
    "GR2PO, one start": GR2PO,
    "GR2PO, all": GR2PO._replace(start=OWN_STARTS),
}
TASKS = ("Pendulum-v1", "MountainCarContinuous-v0", "Reacher-misc")
LEARNING_RATES = (1e-3, 2.5e-3, 5e-3, 1e-2)


@dataclasses.dataclass
class Arguments:
    """Trains PPO, GRPO and per-step comparisons of groups on control with dense rewards."""

    tasks: tuple[str, ...] = TASKS
    """Environments."""
    methods: tuple[str, ...] = tuple(METHODS)
    """Which methods are trained; those of which the folder has results are not trained again."""
    num_seeds: Seeds = 12
    """Independent runs of each; a learning rate is tried on a fourth as many others."""
    total_steps: Steps = 200_000
    """Environment steps a seed may take."""
    seed: Seed = 0
    """Of all randomness."""
    out: Path = Path("runs/per_step_groups")
    """Folder for the results."""


def main(arguments: Arguments) -> None:
    console = make_console()
    results = read_results(arguments.out, arguments)
    methods = chosen(METHODS, arguments.methods, "method")
    cells = [(task, method) for task in arguments.tasks for method in methods]
    for task, method in track(cells, "training", console=console):
        if method not in results.get(task, {}):
            results.setdefault(task, {})[method] = train(task, method, arguments)
            row = functools.partial(method_cells, methods=METHODS)
            write_results(results, arguments.out, ["environment", *METHODS], row, arguments)
    curves = {task: {name: curve_of(entry) for name, entry in entries.items()} for task, entries in results.items()}
    draw_curves(curves, arguments.out / "per_step_groups.png", "environment steps", arguments.num_seeds)
    console.print((arguments.out / TABLE).read_text(), f"Results in {arguments.out}", soft_wrap=True)


def curve_of(entry: dict) -> Curve:
    return Curve(**{field: np.array(values) for field, values in entry["curve"].items()})


def train(task: str, method: str, arguments: Arguments) -> dict:
    """The returns of the last 100 training episodes of each seed, with the learning rate that was best on others."""
    config, hyperparams = tuned(task, METHODS[method], total_steps=arguments.total_steps)
    if config.algorithm.start is OWN_STARTS:
        config = dataclasses.replace(config, group_size=config.num_envs)
    key_tuning, key_final = jax.random.split(jax.random.key(arguments.seed))
    num_rates, num_trials = len(LEARNING_RATES), -(-arguments.num_seeds // len(LEARNING_RATES))

    rates = np.repeat(LEARNING_RATES, num_trials)
    keys = jnp.tile(jax.random.split(key_tuning, num_trials), num_rates)
    trials = run(config, hyperparams.replace(learning_rate=rates), keys).final_return.reshape(num_rates, num_trials)
    best = LEARNING_RATES[np.argmax(np.nan_to_num(trials.mean(axis=1), nan=-np.inf))]

    started, rates = time.process_time(), np.full(arguments.num_seeds, best)
    result = run(config, hyperparams.replace(learning_rate=rates), jax.random.split(key_final, arguments.num_seeds))
    seconds = (time.process_time() - started) / arguments.num_seeds
    counts = np.nan_to_num(result.metrics["episode/count"])
    curve = learning_curve(result.steps, result.metrics["episode/return_mean"], counts, num_points=50)
    curve = {field: np.asarray(values).round(2).tolist() for field, values in curve._asdict().items()}
    about = {"learning_rate": best, "tuning": trials, "core_seconds": seconds, "curve": curve}
    return score_summary(result.final_return) | about


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

"""Every algorithm on CartPole, or on a task that has what it needs: `python -m experiments.family`."""

import dataclasses
from pathlib import Path

import numpy as np

from grpo_jax import FRESH, PPO, tuned
from grpo_jax.algorithms import ALGORITHMS, by_name, name_of
from grpo_jax.commands.harness.command import command
from grpo_jax.commands.harness.limits import Seeds, Steps
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.commands.harness.study import CommandStudy, StudyArguments
from grpo_jax.environments import tokens
from grpo_jax.policies import Transformer
from grpo_jax.recording.figures import SOLVED_AT, draw_curve, panels, plot_settings
from grpo_jax.recording.statistics import learning_curve
from grpo_jax.runs.run_spec import RunSpec
from grpo_jax.sweeps.runs import Run

CART_POLE = "CartPole-v1"
SORT = tokens.make_task("sort-3")._replace(rewards=(tokens.ACCURACY, tokens.FORMAT, tokens.PROGRESS))
SORT_SETTINGS = {"num_envs": 512, "group_size": 8, "num_epochs": 1, "num_minibatches": 4, "learning_rate": 2e-3}
ON_SORT = ("experiments.family:SORT", SORT_SETTINGS | {"network": Transformer(width=32)})
OTHER_TASKS = {"grpo_process": ON_SORT, "gdpo": ON_SORT}
"""The task and its settings of an algorithm that cannot train on CartPole; `grpo` is trained there too.

`grpo_process` normalises the rewards of steps over a group, and CartPole pays 1 at every step; `gdpo` compares parts of
a reward.
"""

PPO_OF_PROMPTS = PPO._replace(start=FRESH)
"""For `grpo-jax sweep` on a token task."""

WHY_NOT = {"pass_at_k": "learns slowly: only the best member of each group has a positive advantage"}
"""Why an algorithm does not solve CartPole within the budget."""


@dataclasses.dataclass
class Arguments(StudyArguments):
    """Trains every algorithm of the library on CartPole-v1, or on another task beside grpo, and compares them."""

    algorithms: tuple[str, ...] = tuple(ALGORITHMS)
    """Names of the algorithms."""
    num_seeds: Seeds = 8
    """Independent runs of each."""
    total_steps: Steps = 500_000
    """Environment steps a seed may take."""


def main(arguments: Arguments) -> None:
    study = CommandStudy("family", make_plans(arguments), arguments)
    study.run_all()
    on_cart_pole = [run for run in study.runs if run.environment == CART_POLE]
    unsolved = {str(run.setting) for run in on_cart_pole if run.final_returns.mean() < SOLVED_AT[CART_POLE]}
    study.finish()
    for label in sorted(unsolved):
        study.console.print(f"{label}: {WHY_NOT.get(label, 'did not solve it')}", soft_wrap=True)
    if on_cart_pole:
        plot_family(on_cart_pole, study.out / "family.png")
    if others := [run for run in study.runs if run.environment != CART_POLE]:
        plot_settings({run.setting: run.result for run in others}, study.out / "other_tasks.png")


def make_plans(arguments: Arguments) -> list[RunSpec]:
    runs = []
    for name in (name_of(by_name(name)) for name in arguments.algorithms):
        task, settings = OTHER_TASKS.get(name, (CART_POLE, {}))
        if task != CART_POLE and (task, "grpo", settings) not in runs:
            runs.append((task, "grpo", settings))
        runs.append((task, name, settings))
    keys, total_steps = arguments.training_keys, arguments.total_steps
    return [RunSpec(name, *tuned(task, name, total_steps=total_steps, **fields), keys) for task, name, fields in runs]


def plot_family(runs: list[Run], path: Path) -> None:
    """A small panel for each algorithm, the first run in grey behind the others."""
    title = (
        f"{CART_POLE}: IQM of {len(runs[0].final_returns)} seeds, 95% interval; grey: {runs[0].setting}; "
        "number: mean final return"
    )
    curves = [
        learning_curve(run.result.steps, run.returns, np.nan_to_num(run.result.metrics["episode/count"]))
        for run in runs
    ]
    with panels(path, len(runs), size=(2.6, 2.0), title=title, sharex=True, sharey=True) as (figure, axes):
        for run, curve, axis in zip(runs, curves, axes, strict=True):
            axis.plot(curves[0].steps, curves[0].mean, color="0.75", zorder=1)
            draw_curve(axis, curve, "C0")
            axis.set_title(str(run.setting), fontsize="small")
            axis.text(0.97, 0.06, f"{np.mean(run.final_returns):.0f}", transform=axis.transAxes, ha="right", color="C0")
        figure.supxlabel("environment steps (each seed)", fontsize="small")
        figure.supylabel("return of training episodes", fontsize="small")


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

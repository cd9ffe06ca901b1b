"""All algorithms on one task: `python -m experiments.family`."""

import dataclasses
from pathlib import Path

import numpy as np

from grpo_jax.algorithms import ALGORITHMS, by_name, name_of
from grpo_jax.commands.harness.command import command
from grpo_jax.commands.harness.limits import Seeds, Steps
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.commands.harness.settings import make_plan
from grpo_jax.commands.harness.study import Study, StudyArguments
from grpo_jax.recording import learning_curve
from grpo_jax.recording.figures import SOLVED_AT, draw_curve, panels
from grpo_jax.sweeps.runs import Run

WHY_NOT = {
    "grpo_process": "cannot learn here: CartPole pays 1 at every step, so rewards normalised over a group are all 0",
    "pass_at_k": "learns slowly: only the best member of each group has a positive advantage",
}
"""Why an algorithm cannot solve CartPole within the budget."""


@dataclasses.dataclass
class Arguments(StudyArguments):
    """Trains every algorithm of the library on CartPole-v1 and compares them."""

    algorithms: tuple[str, ...] = tuple(
        name for name, algorithm in ALGORITHMS.items() if not algorithm.num_branches and name != "gdpo"
    )
    """Names of the algorithms; all but vine_ppo, whose branches from every state of an episode exceed the budget, and
    gdpo, which compares parts of a reward that CartPole does not have."""
    num_seeds: Seeds = 8
    """Independent runs of each."""
    total_steps: Steps = 500_000
    """Environment steps a seed may take."""


def main(arguments: Arguments) -> None:
    plans = [
        make_plan("CartPole-v1", name, arguments.training_keys, total_steps=arguments.total_steps)
        for name in (name_of(by_name(name)) for name in arguments.algorithms)
    ]
    study = Study("family", plans, arguments)
    study.run_all()
    unsolved = {run.label for run in study.runs if run.final_returns.mean() < SOLVED_AT["CartPole-v1"]}
    study.finish(notes={label: WHY_NOT.get(label, "did not solve it") for label in unsolved})
    plot_family(study.runs, study.out / "family.png")


def plot_family(runs: list[Run], path: Path) -> None:
    """A small panel for each algorithm, the first run in grey behind the others."""
    title = (
        f"CartPole-v1: IQM of {len(runs[0].final_returns)} seeds, 95% interval; grey: {runs[0].label}; "
        "number: mean final return"
    )
    curves = [learning_curve(run.result.steps, run.returns, run.counts) for run in runs]
    with panels(path, len(runs), size=(2.6, 2.0), title=title, sharex=True, sharey=True) as (figure, axes):
        for run, curve, axis in zip(runs, curves, axes, strict=True):
            axis.plot(curves[0].steps, curves[0].mean, color="0.75", zorder=1)
            draw_curve(axis, curve, "C0")
            axis.set_title(run.label, fontsize="small")
            axis.text(0.97, 0.06, f"{np.mean(run.final_returns):.0f}", transform=axis.transAxes, ha="right", color="C0")
        figure.supxlabel("environment steps (each seed)", fontsize="small")
        figure.supylabel("return of training episodes", fontsize="small")


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

"""Grids and random samples of settings: `python -m experiments.sweep --learning-rate 1e-4 1e-3 1e-2 --num-seeds 16`.

Any flag of `experiments.train` may have several values, which makes it an axis. Axes of `Hyperparams` share a program
with the seeds, one row each; axes of `Config` change the program, and are gone through one after the other.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import tyro
from rich.table import Table

from experiments.harness.command import command
from experiments.harness.figures import plot_curves, shown, solved_after
from experiments.harness.flags import as_fields
from experiments.harness.grid import Sweep, make_sweep
from experiments.harness.programs import SPLIT_FILE, make_programs
from experiments.harness.runs import Plan, Run
from experiments.harness.settings import SOLVED_AT
from experiments.harness.study import Study, StudyArguments, check_plans
from grpo_jax.recording.files import part_of_record, read_record, write_json
from grpo_jax.recording.logbook import Logbook
from grpo_jax.recording.recorded_run import Subject
from grpo_jax.recording.statistics import bootstrap_interval, iqm
from grpo_jax.training.run import Chunk

NUM_SHOWN = 20


@dataclasses.dataclass(kw_only=True)
class Arguments(StudyArguments):
    """Trains every combination of the values given, all seeds, and ranks them.

    Beside the flags below, any flag of experiments.train, with one value or with several: --learning-rate 1e-3 1e-2.
    """

    samples: int | None = None
    """Draw so many settings at random, log-uniformly between the two values of each flag, in place of a grid."""
    memory_gib: float | None = None
    """GiB on each device that may be used; by default 80% of what there is. More rows than fit go one after another."""


# --- running ---------------------------------------------------------------------------------------------------------


def run_program(study: Study, subject: Subject, plans: list[Plan], arguments: Arguments) -> None:
    """Trains configurations at once; the study records them one by one.

    They share their program's time: steps per second of each are a part of the program's.
    """
    together = study.train(subject, jnp.repeat(arguments.keys()[1], len(plans)))
    runs = []
    for i, plan in enumerate(plans):
        mine = np.s_[..., i :: len(plans)]
        metrics = {name: value[mine] for name, value in together.result.metrics.items()}
        result = together.result._replace(states=None, metrics=metrics, steps=together.result.steps[mine])
        run = together._replace(
            label=plan.label, hyperparams=plan.hyperparams, result=result, final_returns=together.final_returns[mine]
        )
        name = f"{plan.label} on {run.environment}"
        with Logbook(
            study.out,
            run=name,
            total_steps=int(plan.hyperparams.total_steps),
            num_seeds=arguments.num_seeds,
            console=False,
            past=read_record(study.out, name).until(0) if arguments.resume else None,
        ) as logbook:
            logbook.record(Chunk(metrics, result.steps, iteration=0, seconds=result.train_seconds))
        runs.append(run)
    study.record(*runs)


def main(arguments: Arguments, flags: Sequence[str]) -> None:
    sweep = make_sweep(flags, arguments.samples, arguments.seed)
    mesh = check_plans(sweep.plans, arguments)
    programs = make_programs(
        sweep,
        arguments.keys()[0],  # those that experiments.train would use
        mesh,
        memory_gib=arguments.memory_gib,
        resumed=arguments.out if arguments.resume else None,
    )
    study = Study("sweep", sweep.plans, arguments, programs=[subject for subject, _ in programs])
    write_json(part_of_record(study.out / SPLIT_FILE), [[plan.label for plan in plans] for _, plans in programs])
    for subject, plans in programs:
        run_program(study, subject, plans, arguments)
    show(study, sweep)


# --- results ---------------------------------------------------------------------------------------------------------


def show(study: Study, sweep: Sweep) -> None:
    """Prints the ranking, draws sweep.png and learning_curves.png, and writes best.json."""
    point_of = {plan.label: point for plan, point in zip(sweep.plans, sweep.points, strict=True)}
    scored = [(float(iqm(run.final_returns)), run) for run in study.runs]
    # A configuration that diverged has no number, and comes last.
    ranked = [run for _, run in sorted(scored, key=lambda pair: -np.nan_to_num(pair[0], nan=-np.inf))]
    best = ranked[0]
    study.console.print(ranking(sweep.axes, [point_of[run.label] for run in ranked], ranked))
    write_json(study.out / "best.json", as_fields(best.config, best.hyperparams))
    plot(sweep.axes, [point_of[run.label] for run in study.runs], study.runs, study.out / "sweep.png")
    plot_curves(ranked[:10], study.out / "learning_curves.png", "environment steps")
    for line in (
        f"Final return: IQM and 95% interval over {len(best.final_returns)} seeds.",
        f"Results in {study.out}: summary.json, metrics.jsonl, best.json, sweep.png, learning_curves.png (best ten)",
        f"The best again: python -m experiments.train --config {study.out / 'best.json'}",
    ):
        study.console.print(line, soft_wrap=True)


def ranking(axes: Sequence[str], points: list[tuple], runs: list[Run]) -> Table:
    """The best configurations, best first."""
    environment = runs[0].environment
    solved = [f"steps to {SOLVED_AT[environment]:g}"] if environment in SOLVED_AT else []
    title = environment + (f", the best {NUM_SHOWN} of {len(runs)}" if len(runs) > NUM_SHOWN else "")
    rendered = Table("", *axes, "final return", "worst seed", *solved, "steps a seed", title=title)
    for rank, (point, run) in enumerate(zip(points[:NUM_SHOWN], runs, strict=False), start=1):
        low, high = bootstrap_interval(run.final_returns)
        row = [str(rank), *map(shown, point), f"{iqm(run.final_returns):.4g} [{low:.4g}, {high:.4g}]"]
        row.append(f"{run.final_returns.min():.4g}")
        if solved:
            steps = solved_after(run)
            row.append(f"{steps:,.0f}" if np.isfinite(steps) else "not reached")
        rendered.add_row(*row, f"{run.result.steps[-1].mean():,.0f}")
    return rendered


def plot(axes: Sequence[str], points: list[tuple], runs: list[Run], path: Path) -> None:
    """A heat map of the IQMs where there are two axes in a grid; else a panel for each axis, with 95% intervals."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    scores = np.array([iqm(run.final_returns) for run in runs])
    points = [*zip(*map(_of_one_kind, zip(*points, strict=True)), strict=True)]
    values = [sorted(set(column)) for column in zip(*points, strict=True)]
    if len(axes) == 2 and len(runs) == len(values[0]) * len(values[1]):
        size = (2 + 0.9 * len(values[1]), 1.6 + 0.6 * len(values[0]))
        figure, axis = plt.subplots(figsize=size, layout="constrained")
        grid = np.empty([len(column) for column in values])
        for point, score in zip(points, scores, strict=True):
            grid[tuple(column.index(value) for column, value in zip(values, point, strict=True))] = score
        image = axis.imshow(grid, origin="lower", aspect="auto")
        for row, column in np.ndindex(grid.shape):
            light = image.norm(grid[row, column]) > 0.6
            axis.text(column, row, f"{grid[row, column]:.4g}", ha="center", va="center", color="k" if light else "w")
        axis.set(ylabel=axes[0], xlabel=axes[1])
        axis.set_yticks(range(len(values[0])), map(shown, values[0]))
        axis.set_xticks(range(len(values[1])), map(shown, values[1]))
        figure.colorbar(image, label="final return (IQM)")
    else:
        columns = min(4, len(axes))
        rows = -(-len(axes) // columns)
        size = (4.8 * columns, 3.6 * rows)
        figure, panels = plt.subplots(rows, columns, figsize=size, sharey=True, squeeze=False, layout="constrained")
        intervals = np.array([bootstrap_interval(run.final_returns) for run in runs]).T
        errors = abs(intervals - scores)
        for i, axis in enumerate(panels.flat):
            axis.set_visible(i < len(axes))
            if i < len(axes):
                x = [point[i] for point in points]
                axis.errorbar(x, scores, errors, fmt="o", markersize=4, elinewidth=0.8, capsize=2)
                if not isinstance(x[0], str) and min(x) > 0 and max(x) >= 10 * min(x):
                    axis.set_xscale("log")
                axis.set(xlabel=axes[i])
                axis.spines[["top", "right"]].set_visible(False)
        figure.supylabel("final return (IQM, 95% interval)", fontsize="medium")
    figure.suptitle(f"{runs[0].environment}, {len(runs[0].final_returns)} seeds", fontsize="small", color="0.4")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _of_one_kind(column: tuple[float | str, ...]) -> tuple[float, ...] | tuple[str, ...]:
    """Values that can be put in order: all are words where one is, such as None."""
    return tuple(map(shown, column)) if any(isinstance(value, str) for value in column) else column


if __name__ == "__main__":
    command(lambda: main(*tyro.cli(Arguments, args=sys.argv[1:], return_unknown_args=True)))

"""Grids and random samples of settings: `grpo-jax sweep --learning-rate 1e-4 1e-3 1e-2 --num-seeds 16`.

A flag of `grpo-jax train` with several values is an axis. The settings of `Hyperparams` are trained in one program,
a row for each of them and each seed; those of `Config` need a program each, and are trained one after another.
"""

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from rich.table import Table

from grpo_jax.commands.harness.command import command
from grpo_jax.commands.harness.figures import plot_curves, return_cells, return_columns
from grpo_jax.commands.harness.limits import Count, Positive
from grpo_jax.commands.harness.parsing import invocation, parse_known_flags
from grpo_jax.commands.harness.runs import PROGRAMS, Run
from grpo_jax.commands.harness.study import Study, StudyArguments, check_plans
from grpo_jax.commands.harness.sweeps import SPLIT_FILE, Sweep, make_programs, make_sweep, split_policies
from grpo_jax.devices.processes import is_process_zero
from grpo_jax.recording import bootstrap_interval, iqm
from grpo_jax.recording.config_file import as_fields
from grpo_jax.recording.figures import NUM_DRAWN, panels
from grpo_jax.recording.files import write_json
from grpo_jax.recording.metrics_file import format_value
from grpo_jax.recording.metrics_logger import MetricsLogger
from grpo_jax.recording.policy_saver import FOLDER as POLICIES
from grpo_jax.recording.recorder import NO_ITERATIONS
from grpo_jax.recording.run_spec import RunSpec
from grpo_jax.training.progress import Chunk

NUM_SHOWN = 20


@dataclasses.dataclass(kw_only=True)
class Arguments(StudyArguments):
    """Trains every combination of the values given, all seeds, and ranks them.

    Beside the flags below, any flag of the command train, with one value or with several: --learning-rate 1e-3 1e-2.
    """

    samples: Count | None = None
    """Draw so many settings at random, log-uniformly between the two values of each flag, in place of a grid."""
    memory_gib: Positive | None = None
    """GiB on each device that may be used; by default 80% of what there is. More rows than fit go one after another."""


def main(arguments: Arguments, flags: Sequence[str]) -> None:
    # With the keys of grpo-jax train, so that each run is the one that it would be there.
    sweep = make_sweep(flags, arguments.training_keys, arguments.samples, arguments.seed)
    mesh = check_plans(sweep.plans, arguments)
    resumed = arguments.out if arguments.recording.resume else None
    programs = make_programs(sweep, mesh, memory_gib=arguments.memory_gib, resumed=resumed)
    study = Study("sweep", sweep.plans, arguments, programs=[program for program, _ in programs])
    write_json(study.out / SPLIT_FILE, [[plan.label for plan in plans] for _, plans in programs])
    for program, plans in programs:
        run_program(study, program, plans, arguments)
    ranked = show(study, sweep)
    if is_process_zero():
        split_policies(study.out, programs, {run.label for run in ranked[:NUM_DRAWN]})
        if not arguments.recording.checkpoint_every:  # else a sweep that is resumed needs them
            shutil.rmtree(study.out / PROGRAMS / POLICIES)
    study.print_files(
        *("summary.json", "metrics.jsonl", "best.json", "sweep.png"), f"learning_curves.png (best {NUM_DRAWN})"
    )
    study.console.print(f"The best again: {invocation('train')} --config {study.out / 'best.json'}", soft_wrap=True)


def run_program(study: Study, program: RunSpec, plans: list[RunSpec], arguments: Arguments) -> None:
    """Trains the rows of several plans at once, and records each plan as a separate run.

    They share the time of their program: the steps per second of each are a part of the program's.
    """
    together = study.train(program, jnp.repeat(arguments.evaluation_keys, len(plans)))
    runs = []
    for plan, rows in zip(plans, program.settings.rows.values(), strict=True):
        run = together.of_rows(rows, plan.label, plan.hyperparams)
        with MetricsLogger(
            study.out,
            plan,
            console=False,
            # What an interrupted sweep has written is replaced.
            past=NO_ITERATIONS if arguments.recording.resume else None,
        ) as logger:
            logger.record(Chunk(run.result.metrics, run.result.steps, iteration=0, seconds=run.result.train_seconds))
        runs.append(run)
    study.add(*runs)


def show(study: Study, sweep: Sweep) -> list[Run]:
    """Prints the ranking, draws sweep.png and learning_curves.png, and writes best.json; returns the ranked runs."""
    points = {plan.label: point for plan, point in zip(sweep.plans, sweep.points, strict=True)}
    scored = [(float(iqm(run.final_returns)), run) for run in study.runs]
    # The score of a configuration that diverged is NaN, and comes last.
    ranked = [run for _, run in sorted(scored, key=lambda pair: -np.nan_to_num(pair[0], nan=-np.inf))]
    best = ranked[0]
    study.console.print(ranking(sweep.axes, [points[run.label] for run in ranked], ranked))
    write_json(study.out / "best.json", as_fields(best.config, best.hyperparams))
    plot(sweep.axes, [points[run.label] for run in study.runs], study.runs, study.out / "sweep.png")
    plot_curves(ranked[:NUM_DRAWN], study.out / "learning_curves.png", "environment steps")
    num_seeds = len(best.final_returns)
    study.console.print(f"Final return: IQM and 95% interval over {num_seeds} seeds.", soft_wrap=True)
    return ranked


def ranking(axes: Sequence[str], points: list[tuple], runs: list[Run]) -> Table:
    environment = runs[0].environment
    title = environment + (f", the best {NUM_SHOWN} of {len(runs)}" if len(runs) > NUM_SHOWN else "")
    rendered = Table("", *axes, *return_columns(environment), title=title)
    for rank, (point, run) in enumerate(zip(points[:NUM_SHOWN], runs, strict=False), start=1):
        rendered.add_row(str(rank), *map(format_value, point), *return_cells(run))
    return rendered


def plot(axes: Sequence[str], points: list[tuple], runs: list[Run], path: Path) -> None:
    """A heat map of the IQMs where there are two axes in a grid; else a panel for each axis, with 95% intervals."""
    scores = np.array([iqm(run.final_returns) for run in runs])
    columns = [_sortable(column) for column in zip(*points, strict=True)]
    values = [sorted(set(column)) for column in columns]
    title = f"{runs[0].environment}, {len(runs[0].final_returns)} seeds"
    if len(axes) == 2 and len(runs) == len(values[0]) * len(values[1]):
        size = (2 + 0.9 * len(values[1]), 1.6 + 0.6 * len(values[0]))
        with panels(path, 1, size=size, title=title) as (figure, (axis,)):
            grid = np.empty((len(values[0]), len(values[1])))
            for y, x, score in zip(*columns, scores, strict=True):
                grid[values[0].index(y), values[1].index(x)] = score
            image = axis.imshow(grid, origin="lower", aspect="auto")
            for y, x in np.ndindex(grid.shape):
                is_light = image.norm(grid[y, x]) > 0.6
                axis.text(x, y, f"{grid[y, x]:.4g}", ha="center", va="center", color="k" if is_light else "w")
            axis.set(ylabel=axes[0], xlabel=axes[1])
            axis.set_yticks(range(len(values[0])), map(format_value, values[0]))
            axis.set_xticks(range(len(values[1])), map(format_value, values[1]))
            figure.colorbar(image, label="final return (IQM)")
        return
    errors = abs(np.array([bootstrap_interval(run.final_returns) for run in runs]).T - scores)
    with panels(path, len(axes), size=(4.8, 3.6), columns=4, title=title, sharey=True) as (figure, panel_axes):
        for name, x, axis in zip(axes, columns, panel_axes, strict=True):
            axis.errorbar(x, scores, errors, fmt="o", markersize=4, elinewidth=0.8, capsize=2)
            if not isinstance(x[0], str) and min(x) > 0 and max(x) >= 10 * min(x):
                axis.set_xscale("log")
            axis.set(xlabel=name)
        figure.supylabel("final return (IQM, 95% interval)", fontsize="medium")


def _sortable(column: tuple[float | str, ...]) -> tuple[float, ...] | tuple[str, ...]:
    """The values of an axis; all of them as words if one is a word, such as None."""
    return tuple(map(format_value, column)) if any(isinstance(value, str) for value in column) else column


if __name__ == "__main__":
    command(lambda: main(*parse_known_flags(Arguments)))

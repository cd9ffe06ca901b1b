"""Tables and learning curves of runs."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from rich.table import Column, Table

from experiments.harness.runs import Run
from experiments.harness.settings import SOLVED_AT
from grpo_jax.recording.statistics import Curve, bootstrap_interval, iqm, learning_curve, steps_to_reach


def solved_after(run: Run) -> float:
    """Median over seeds of the steps until the training return, averaged over 2% of the budget, is a solved task's.

    An iteration of one-episode groups alone is often more than 2%.
    """
    budget = float(run.hyperparams.total_steps)
    budget = budget if math.isfinite(budget) else float(run.result.steps.max())
    window = max(1, round(0.02 * budget / run.config.steps_per_iteration))
    return float(np.median(steps_to_reach(run.result.steps, run.returns, SOLVED_AT[run.environment], window=window)))


def table(runs: list[Run], notes: Mapping[str, str]) -> Table:
    """The runs on one environment side by side."""
    environment = runs[0].environment
    columns = [Column("run", overflow="fold"), "final return", "worst seed", "steps a seed"]
    if environment in SOLVED_AT:
        columns.append(f"steps to {SOLVED_AT[environment]:g}")
    caption = "\n".join(f"{run.label}: {notes[run.label]}" for run in runs if run.label in notes)
    rendered = Table(*columns, "train", "compile", "wall", "steps/s", title=environment, caption=caption or None)
    for run in runs:
        low, high = bootstrap_interval(run.final_returns)
        row = [
            run.label,
            f"{iqm(run.final_returns):.4g} [{low:.4g}, {high:.4g}]",
            f"{run.final_returns.min():.4g}",
            f"{run.result.steps[-1].mean():,.0f}",
        ]
        if environment in SOLVED_AT:
            solved = solved_after(run)
            row.append(f"{solved:,.0f}" if np.isfinite(solved) else "not reached")
        row += [f"{run.result.train_seconds:.0f} s", f"{run.result.compile_seconds:.0f} s"]
        row.append(f"{run.wall_seconds:.0f} s")
        rendered.add_row(*row, f"{run.steps_per_second:,.0f}")
    return rendered


def plot_curves(runs: list[Run], path: Path, over: str) -> None:
    """One panel for each environment: IQM over seeds with its 95% band, over "environment steps" or "episodes"."""
    panels: dict[str, dict[str, Curve]] = {run.environment: {} for run in runs}
    for run in runs:
        if not np.isnan(run.returns).all():
            made = run.result.steps if over == "environment steps" else run.episodes
            panels[run.environment][run.label] = learning_curve(made, run.returns, run.counts)
    draw_curves(panels, path, over, len(runs[0].final_returns))


def draw_curves(panels: Mapping[str, Mapping[str, Curve]], path: Path, over: str, num_seeds: int) -> None:
    """The curves of each environment, by their labels, in a panel."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = list(dict.fromkeys(label for curves in panels.values() for label in curves))
    columns = min(5, len(panels))
    rows = -(-len(panels) // columns)
    width, dpi = (6.4, 150) if columns < 4 else (4.8, 90)
    size = (width * columns, 0.66 * width * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for (environment, curves), axis in zip(panels.items(), axes.flat, strict=False):
        for label, curve in curves.items():
            color = f"C{labels.index(label)}"
            axis.plot(curve.steps, curve.mean, color=color, label=label)
            axis.fill_between(curve.steps, curve.low, curve.high, color=color, alpha=0.2, linewidth=0)
        if environment in SOLVED_AT:
            axis.axhline(SOLVED_AT[environment], color="0.6", linestyle="--", linewidth=0.8, zorder=0)
        axis.set(title=environment, xlabel=f"{over} (each seed)", ylabel="return of training episodes")
        axis.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
        axis.spines[["top", "right"]].set_visible(False)
        if len(curves) > 6:  # they would hide what they explain
            axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
        else:
            axis.legend(frameon=False, loc="lower right")
    figure.suptitle(f"IQM of {num_seeds} seeds, 95% bootstrap interval", fontsize="small", color="0.4")
    figure.savefig(path, dpi=dpi)
    plt.close(figure)


def shown(value: float | str) -> str:
    """A value of an axis, exactly, in few characters."""
    if isinstance(value, str):
        return value
    short = f"{value:g}"
    return short if float(short) == value else repr(float(value))

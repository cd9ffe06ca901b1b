"""Tables and pictures of runs."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Column, Table

from grpo_jax.recording import Curve, bootstrap_interval, iqm, learning_curve, steps_to_reach
from grpo_jax.training.evaluations import SAMPLED

from .runs import Run
from .settings import SOLVED_AT


def solved_after(run: Run) -> float:
    """Median over seeds of the steps until the training return, averaged over 2% of the run, is a solved task's.

    An iteration of one-episode groups alone is often more than 2%.
    """
    window = max(1, round(0.02 * float(run.result.steps.max()) / run.config.steps_per_iteration))
    return float(np.median(steps_to_reach(run.result.steps, run.returns, SOLVED_AT[run.environment], window=window)))


def return_columns(environment: str) -> list[str]:
    """The headers of `return_cells`."""
    solved = [f"steps to {SOLVED_AT[environment]:g}"] if environment in SOLVED_AT else []
    return ["final return", "worst seed", *solved, "steps a seed"]


def return_cells(run: Run) -> list[str]:
    """The final return with its interval, the worst seed's, the steps until it was solved, and the steps taken."""
    cells = [with_interval(run.final_returns), f"{run.final_returns.min():.4g}"]
    if run.environment in SOLVED_AT:
        solved = solved_after(run)
        cells.append(f"{solved:,.0f}" if np.isfinite(solved) else "not reached")
    return [*cells, f"{run.result.steps[-1].mean():,.0f}"]


def with_interval(scores: np.ndarray, spec: str = ".4g") -> str:
    """The interquartile mean of scores and its 95% interval."""
    low, high = bootstrap_interval(scores)
    return f"{iqm(scores):{spec}} [{low:{spec}}, {high:{spec}}]"


def table(runs: list[Run], notes: Mapping[str, str]) -> Table:
    """The runs on one environment side by side, with notes on some of them, by label, below."""
    environment = runs[0].environment
    columns = [Column("run", overflow="fold"), *return_columns(environment), "steps/s", "train", "compile", "wall"]
    caption = "\n".join(f"{run.label}: {notes[run.label]}" for run in runs if run.label in notes)
    rendered = Table(*columns, title=environment, caption=caption or None)
    for run in runs:
        seconds = run.result.train_seconds, run.result.compile_seconds, run.wall_seconds
        times = [f"{value:.0f} s" for value in seconds]
        rendered.add_row(run.label, *return_cells(run), f"{run.steps_per_second:,.0f}", *times)
    return rendered


@contextlib.contextmanager
def panels(
    path: Path, count: int, *, size: tuple[float, float], columns: int = 5, title: str = "", **options: Any
) -> Iterator[tuple[Any, list[Any]]]:
    """A picture of `count` panels of a size in inches, in rows of at most `columns`, saved when the block ends.

    Yields matplotlib's figure and the panels' axes. `options` are those of `plt.subplots`.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(columns, count)
    rows = -(-count // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(size[0] * columns, size[1] * rows), squeeze=False, layout="constrained", **options
    )
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    yield figure, list(axes.flat[:count])
    figure.suptitle(title, fontsize="small", color="0.4")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_curve(axis: Any, curve: Curve, color: str, label: str | None = None) -> None:
    """A learning curve with its band, over steps."""
    from matplotlib.ticker import EngFormatter

    axis.plot(curve.steps, curve.mean, color=color, label=label)
    axis.fill_between(curve.steps, curve.low, curve.high, color=color, alpha=0.2, linewidth=0)
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))


def plot_curves(runs: list[Run], path: Path, over: str) -> None:
    """One panel for each environment: IQM over seeds with its 95% band, over "environment steps" or "episodes".

    Returns are those of the evaluations while training, if all runs have some.
    """
    evaluated = all(SAMPLED in run.result.metrics for run in runs)
    curves: dict[str, dict[str, Curve]] = {run.environment: {} for run in runs}
    for run in runs:
        returns, counts = (run.result.metrics[SAMPLED], None) if evaluated else (run.returns, run.counts)
        if not np.isnan(returns).all():
            x = run.result.steps if over == "environment steps" else run.episodes
            curves[run.environment][run.label] = learning_curve(x, returns, counts)
    draw_curves(curves, path, over, len(runs[0].final_returns), of="evaluation" if evaluated else "training")


def draw_curves(
    curves: Mapping[str, Mapping[str, Curve]], path: Path, over: str, num_seeds: int, of: str = "training"
) -> None:
    """A panel for each environment, with its curves by label."""
    labels = list(dict.fromkeys(label for by_label in curves.values() for label in by_label))
    size = (6.4, 4.2) if len(curves) < 4 else (4.8, 3.2)
    title = f"IQM of {num_seeds} seeds, 95% bootstrap interval"
    with panels(path, len(curves), size=size, title=title) as (_, axes):
        for (environment, by_label), axis in zip(curves.items(), axes, strict=True):
            for label, curve in by_label.items():
                draw_curve(axis, curve, f"C{labels.index(label)}", label)
            if environment in SOLVED_AT:
                axis.axhline(SOLVED_AT[environment], color="0.6", linestyle="--", linewidth=0.8, zorder=0)
            axis.set(title=environment, xlabel=f"{over} (each seed)", ylabel=f"return of {of} episodes")
            if len(by_label) > 6:  # too many for a legend inside
                axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
            else:
                axis.legend(frameon=False, loc="lower right")


def format_value(value: float | str) -> str:
    """A setting, exactly, in few characters."""
    if isinstance(value, str):
        return value
    short = f"{value:g}"
    return short if float(short) == value else repr(float(value))

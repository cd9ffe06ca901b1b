"""Tables of runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike
from rich.table import Column, Table

from grpo_jax.recording import bootstrap_interval, iqm
from grpo_jax.recording.figures import SOLVED_AT
from grpo_jax.recording.statistics import checked
from grpo_jax.sweeps.runs import Run


def solved_after(run: Run) -> float:
    """Median over seeds of the steps until the training return, averaged over 2% of the run, is a solved task's.

    An iteration of one-episode groups alone is often more than 2%.
    """
    window = max(1, round(0.02 * float(run.result.steps.max()) / run.config.steps_per_iteration))
    return float(np.median(steps_to_reach(run.result.steps, run.returns, SOLVED_AT[run.environment], window=window)))


def steps_to_reach(steps: ArrayLike, returns: ArrayLike, threshold: float, *, window: int = 1) -> np.ndarray:
    """Environment steps after which each seed's running mean return first is at least `threshold`.

    Args:
      steps, returns: as for `learning_curve`.
      threshold: the return to reach.
      window: how many iterations the running mean covers; padding and iterations without a return do not count.

    Returns:
      `[num_seeds]` float64, inf for a seed that never reaches it or has fewer than `window` returns.
    """
    steps, returns, advanced = checked(steps, returns)
    usable = advanced & ~np.isnan(returns)
    reached = np.full(steps.shape[1], np.inf)
    for i, rows in enumerate(usable.T):
        if rows.sum() >= window:
            running_mean = np.lib.stride_tricks.sliding_window_view(returns[rows, i], window).mean(axis=-1)
            hits = np.flatnonzero(running_mean >= threshold)
            if len(hits):
                reached[i] = steps[rows, i][hits[0] + window - 1]
    return reached


def return_columns(run: Run) -> list[str]:
    """The names of `return_cells`."""
    score, steps = run.config.env.words
    solved = [f"steps to {SOLVED_AT[run.environment]:g}"] if run.environment in SOLVED_AT else []
    return [f"final {score}", "worst seed", *solved, f"{steps} a seed"]


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
    environment, (_, steps) = runs[0].environment, runs[0].config.env.words
    columns = [Column("run", overflow="fold"), *return_columns(runs[0]), f"{steps}/s", "train", "compile", "wall"]
    caption = "\n".join(f"{run.setting}: {notes[str(run.setting)]}" for run in runs if str(run.setting) in notes)
    rendered = Table(*columns, title=environment, caption=caption or None)
    for run in runs:
        seconds = run.result.train_seconds, run.result.compile_seconds, run.wall_seconds
        times = [f"{value:.0f} s" for value in seconds]
        rendered.add_row(str(run.setting), *return_cells(run), f"{run.steps_per_second:,.0f}", *times)
    return rendered


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table, with any `|` in its cells escaped, and any break of a line a space."""
    lines = [
        [" ".join(cell.replace("|", r"\|").splitlines()) for cell in cells]
        for cells in (header, ["---"] * len(header), *rows)
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def write_markdown(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    path.write_text(markdown_table(header, rows))

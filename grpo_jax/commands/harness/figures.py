"""Tables of runs."""

import csv
import io
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import rich.box
from numpy.typing import ArrayLike
from rich.console import Console
from rich.table import Column, Table

from grpo_jax.recording.figures import SOLVED_AT
from grpo_jax.recording.statistics import checked, describe_estimate, estimate
from grpo_jax.sweeps.runs import Run

Cell = str | float | tuple[float, ...]
"""A text, a count, or a mean and, of several seeds, the ends of its interval."""
Form = Literal["table", "markdown", "latex", "csv"]
"""What a table is printed as."""


def solved_after(run: Run) -> float:
    """Median over seeds of the steps until the training return, averaged over 2% of the run, is a solved task's.

    An iteration of one-episode groups alone is often more than 2%.
    """
    window = max(1, round(0.02 * float(run.result.steps.max()) / run.config.steps_per_iteration))
    return float(np.median(steps_to_reach(run.result.steps, run.returns, SOLVED_AT[run.environment], window=window)))


def steps_to_reach(steps: ArrayLike, returns: ArrayLike, threshold: float, *, window: int = 1) -> np.ndarray:
    """Environment steps `[num_seeds]` after which a seed's running mean return first is at least `threshold`; else inf.

    Steps and returns are as for `learning_curve`. The mean covers `window` iterations with a return.
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


def return_cells(run: Run) -> list[Cell]:
    """The final return with its interval, the worst seed's, the steps until it was solved, and the steps taken."""
    cells = [estimate(run.final_returns), (run.final_returns.min(),)]
    if run.environment in SOLVED_AT:
        solved = solved_after(run)
        cells.append(solved if np.isfinite(solved) else "not reached")
    return [*cells, run.result.steps[-1].mean()]


def table(runs: Sequence[Run]) -> list[list[Cell]]:
    """The names of the columns, and a row for each run on one environment."""
    _, steps = runs[0].config.env.words
    rows = [["run", *return_columns(runs[0]), f"{steps}/s", "train", "compile", "wall"]]
    for run in runs:
        seconds = run.result.train_seconds, run.result.compile_seconds, run.wall_seconds
        times = [f"{value:.0f} s" for value in seconds]
        rows.append([str(run.setting), *return_cells(run), run.steps_per_second, *times])
    return rows


def print_table(console: Console, rows: Sequence[Sequence[Cell]], form: Form = "table", title: str = "") -> None:
    """Prints a table, whose first row has the names of its columns."""
    header, *texts = ([*map(as_text, row)] for row in rows)
    if form == "table":
        columns = (Column(name, overflow="fold") for name in header)  # a narrow terminal cuts no number
        rendered = Table(*columns, box=rich.box.SIMPLE_HEAD, collapse_padding=True, title=title)
        for row in texts:
            rendered.add_row(*row)
        return console.print(rendered)
    written = (
        csv_table(rows) if form == "csv" else {"markdown": markdown_table, "latex": latex_table}[form](header, texts)
    )
    return console.out(written, end="")


def as_text(cell: Cell) -> str:
    """Such as "77,478", or "493.7 [489.1, 497]"."""
    if isinstance(cell, tuple):
        return describe_estimate(cell) if cell else ""
    return cell if isinstance(cell, str) else f"{cell:,.0f}"


def csv_table(rows: Sequence[Sequence[Cell]]) -> str:
    """The table with whole numbers; two columns with the ends of its intervals follow one that has any."""
    columns: list[list[Any]] = []
    for name, *cells in zip(*rows, strict=True):
        parts = [cell if isinstance(cell, tuple) else (cell,) for cell in cells]
        for i in range(max(map(len, parts))):
            columns.append([f"{name}{('', ' low', ' high')[i]}", *(each[i] if i < len(each) else "" for each in parts)])
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(zip(*columns, strict=True))
    return file.getvalue()


def latex_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table as a tabular with the rules of LaTeX's package booktabs."""
    special = str.maketrans({each: rf"\{each}" for each in "&%$#_{}"} | {"\\": r"\textbackslash{}"})
    first, *lines = (" & ".join(cell.translate(special) for cell in cells) + r" \\" for cells in (header, *rows))
    begin = rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}"
    return "\n".join([begin, r"\toprule", first, r"\midrule", *lines, r"\bottomrule", r"\end{tabular}", ""])


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table, with any `|` in its cells escaped, and any break of a line a space."""
    lines = [
        [" ".join(cell.replace("|", r"\|").splitlines()) for cell in cells]
        for cells in (header, ["---"] * len(header), *rows)
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)

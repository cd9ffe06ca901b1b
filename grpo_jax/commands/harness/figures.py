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
Row = dict[str, Cell]
"""By the names of the columns."""
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


def return_cells(run: Run) -> Row:
    """The final return with its interval, the worst seed's, the steps until it was solved, and the steps taken."""
    score, steps = run.config.env.words
    row: Row = {f"final {score}": estimate(run.final_returns), "worst seed": (run.final_returns.min(),)}
    if run.environment in SOLVED_AT:
        solved = solved_after(run)
        row[f"steps to {SOLVED_AT[run.environment]:g}"] = solved if np.isfinite(solved) else "not reached"
    return row | {f"{steps} a seed": run.result.steps[-1].mean()}


def table(runs: Sequence[Run]) -> list[Row]:
    """A row for each run on one environment."""
    rows = []
    for run in runs:
        seconds = {"train": run.result.train_seconds, "compile": run.result.compile_seconds, "wall": run.wall_seconds}
        speed = {f"{run.config.env.words[1]}/s": run.steps_per_second}
        times = {name: f"{value:.0f} s" for name, value in seconds.items()}
        rows.append({"run": str(run.setting)} | return_cells(run) | speed | times)
    return rows


def print_table(console: Console, rows: Sequence[Row], form: Form = "table", title: str = "") -> None:
    """Prints a table of rows with the same columns; in another form than a table, to standard output."""
    header, texts = [*rows[0]], [[*map(as_text, row.values())] for row in rows]
    if form == "table":
        columns = (Column(name, overflow="fold") for name in header)  # a narrow terminal cuts no number
        rendered = Table(*columns, box=rich.box.SIMPLE_HEAD, collapse_padding=True, title=title)
        for row in texts:
            rendered.add_row(*row)
        console.print(rendered)
    elif not console.quiet:
        make = {"markdown": markdown_table, "latex": latex_table}.get(form)
        print(make(header, texts) if make else csv_table(rows), end="")


def as_text(cell: Cell) -> str:
    """Such as "77,478", or "493.7 [489.1, 497]"."""
    if isinstance(cell, tuple):
        return describe_estimate(cell) if cell else ""
    return cell if isinstance(cell, str) else f"{cell:,.0f}"


def csv_table(rows: Sequence[Row]) -> str:
    """The table with whole numbers; two columns with the ends of its intervals follow one that has any."""
    columns: list[list[Any]] = []
    for name in rows[0]:
        parts = [row[name] if isinstance(row[name], tuple) else (row[name],) for row in rows]
        for i in range(max(map(len, parts))):
            columns.append([f"{name}{('', ' low', ' high')[i]}", *(each[i] if i < len(each) else "" for each in parts)])
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(zip(*columns, strict=True))
    return file.getvalue()


def latex_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table as a tabular with the rules of LaTeX's package booktabs."""
    words = {"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}"}
    special = str.maketrans({each: rf"\{each}" for each in "&%$#_{}"} | words)
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

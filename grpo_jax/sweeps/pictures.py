"""Pictures of results: learning curves with intervals, and final returns over the axes of a sweep."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_jax.recording.figures import panels, plot_settings, ranked_settings
from grpo_jax.recording.statistics import too_few_seeds
from grpo_jax.sweeps.grid import Value
from grpo_jax.sweeps.result import SweepResult
from grpo_jax.training.progress import RunResult
from grpo_jax.training.settings import format_value

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_TICKS = 12
"""Of an axis with more values, the ticks are not at the values."""


def plot(
    result: RunResult | SweepResult | Mapping[str, RunResult], path: str | Path | None = None, metric: str | None = None
) -> "Figure":
    """Draws learning curves: the interquartile mean over the seeds of each setting, with its 95% interval.

    Args:
      result: of `run`, `recorded_run` or `sweep`, or several by their names: `{"ppo": result, "grpo": other}`.
      path: of the picture, such as "curves.png"; with None it is only returned, which a notebook shows.
      metric: a metric's name; by default the return.

    Returns:
      matplotlib's figure.

    Raises:
      ConfigError: there is no such metric.
    """
    environment, blocks = "", {}
    for name, each in (result if isinstance(result, Mapping) else {"": result}).items():
        if isinstance(each, SweepResult):
            environment = each.runs[0].environment
            ranked = {run.label: each.by_setting[run.label] for run in each.ranked_runs}
        else:
            ranked = ranked_settings(each)
        blocks |= {", ".join(filter(None, (name, label))): block for label, block in ranked.items()}
    return plot_settings(environment, blocks, None if path is None else Path(path), metric)


def plot_axes(result: SweepResult, path: Path) -> None:
    """A heat map of the means where there are two axes in a grid; else a panel for each axis, with 95% intervals."""
    ranking = {setting.label: setting for setting in result.ranking}
    settings = [ranking[run.label] for run in result.runs]
    means = np.array([setting.mean for setting in settings])
    intervals = np.array([(setting.low, setting.high) for setting in settings])
    num_seeds = len(settings[0].final_returns)
    note = too_few_seeds(num_seeds)
    title = f"{result.runs[0].environment}, {num_seeds} seeds" + (f"; {note}" if note else "")
    columns = [_comparable(column) for column in zip(*result.points, strict=True)]
    if len(columns) == 2 and len(settings) == len(set(columns[0])) * len(set(columns[1])):
        _draw_heat_map(result.axes, columns, means, intervals, path, title)
        return
    with panels(path, len(columns), size=(4.8, 3.6), columns=4, title=title, sharey=True) as (figure, axes):
        for name, column, axis in zip(result.axes, columns, axes, strict=True):
            _draw_axis(axis, column, means, intervals)
            axis.set(xlabel=name)
        figure.supylabel("final return (IQM, 95% interval)", fontsize="medium")


def _draw_heat_map(
    names: Sequence[str], columns: Sequence[tuple], means: np.ndarray, intervals: np.ndarray, path: Path, title: str
) -> None:
    values = [sorted(set(column)) for column in columns]
    size = (2.2 + 1.1 * len(values[1]), 1.6 + 0.6 * len(values[0]))
    with panels(path, 1, size=size, title=title) as (figure, (axis,)):
        grid, texts = np.full([len(each) for each in values], np.nan), {}
        for y, x, mean, (low, high) in zip(*columns, means, intervals, strict=True):
            place = values[0].index(y), values[1].index(x)
            grid[place], texts[place] = mean, f"[{low:.3g}, {high:.3g}]"
        image = axis.imshow(grid, origin="lower", aspect="auto")
        for (y, x), text in texts.items():
            color = {"color": "k" if image.norm(grid[y, x]) > 0.6 else "w", "ha": "center"}
            axis.text(x, y, f"{grid[y, x]:.4g}", va="bottom", **color)
            axis.text(x, y - 0.06, text, va="top", fontsize="x-small", **color)
        axis.set(ylabel=names[0], xlabel=names[1])
        axis.set_yticks(range(len(values[0])), map(format_value, values[0]))
        axis.set_xticks(range(len(values[1])), map(format_value, values[1]))
        figure.colorbar(image, label="final return (IQM)")


def _draw_axis(axis: Any, column: tuple[Value, ...], means: np.ndarray, intervals: np.ndarray) -> None:
    """The settings over one axis, those of the same value side by side, and the mean of these in front."""
    values = sorted(set(column))
    are_words = isinstance(values[0], str)
    is_log = not are_words and values[0] > 0 and values[-1] >= 10 * values[0]
    places = np.arange(len(values)) if are_words else np.log10(values) if is_log else np.array(values)
    where = np.array([values.index(value) for value in column])
    order = np.array([np.sum(where[:i] == place) for i, place in enumerate(where)])  # among those of the same value
    most = order.max() + 1
    gap = np.diff(places).min() if len(places) > 1 else 1.0
    x = places[where] + 0.6 * gap * ((order + 0.5) / most - 0.5)
    errors = abs(intervals.T - means)
    axis.errorbar(x, means, errors, fmt="o", color="C0", markersize=4, elinewidth=0.8, capsize=2, alpha=0.8)
    if most > 1:
        of_value = [
            np.nanmean(means[where == i]) if np.isfinite(means[where == i]).any() else np.nan
            for i in range(len(values))
        ]
        axis.plot(places, of_value, "s-", color="C1", markersize=5, linewidth=1.2, label="mean over the other axes")
        axis.legend(frameon=False, fontsize="small")
    if len(values) <= MOST_TICKS:
        axis.set_xticks(places, map(format_value, values), rotation=30 if len(values) > 6 else 0)
    elif is_log:
        ticks = np.arange(np.floor(places[0]), np.ceil(places[-1]) + 1)
        axis.set_xticks(ticks, [f"{10.0**tick:g}" for tick in ticks])


def _comparable(column: tuple[Value, ...]) -> tuple[Value, ...]:
    """The values of an axis; all of them as words if one is a word, such as None."""
    return tuple(map(format_value, column)) if any(isinstance(value, str) for value in column) else column

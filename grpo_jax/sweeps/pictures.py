"""Pictures of results: learning curves with intervals, and final returns over the axes of a sweep."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_jax.recording.figures import legend_below, panels, plot_settings, ranked_settings
from grpo_jax.recording.files import as_path
from grpo_jax.recording.statistics import describe_seeds
from grpo_jax.runs.progress import RunResult
from grpo_jax.runs.settings import NAME, Setting, Value, format_value
from grpo_jax.sweeps.result import SweepResult, SweptSetting

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
            environment, own = each.environment, each.by_setting
            ranked = {setting.run.setting: own[setting.run.setting] for setting in each.ranking}
        else:
            ranked = ranked_settings(each)
        named = {NAME: name} if name else {}
        blocks |= {Setting(named | setting.values): block for setting, block in ranked.items()}
    return plot_settings(environment, blocks, None if path is None else as_path(path), metric)


def plot_axes(result: SweepResult, path: Path) -> None:
    """A heat map of the means where there are two axes in a grid; else a panel for each axis, with 95% intervals."""
    settings, names = result.settings, [*result.settings[0].values]
    title = f"{result.environment}: {describe_seeds(result.num_seeds)}"
    columns = [_comparable([setting.values[name] for setting in settings]) for name in names]
    if len(columns) == 2 and len(settings) == len(set(columns[0])) * len(set(columns[1])):
        _draw_heat_map(settings, names, columns, path, title)
        return
    # The values of the first axis have colours.
    several = len(columns) > 1 and len(set(columns[0])) <= MOST_TICKS
    colors = [f"{names[0]}={value}" if several else "" for value in columns[0]]
    with panels(path, len(columns), size=(4.8, 3.6), columns=4, title=title, sharey=True) as (figure, axes):
        for name, column, axis in zip(names, columns, axes, strict=True):
            _draw_axis(axis, settings, column, colors)
            axis.set(xlabel=name)
        figure.supylabel("final return", fontsize="medium")
        if len(columns) > 1:
            legend_below(figure, axes)


def _draw_heat_map(
    settings: Sequence[SweptSetting], names: Sequence[str], columns: Sequence[list[Value]], path: Path, title: str
) -> None:
    values = [sorted(set(column)) for column in columns]
    size = (2.4 + 1.1 * len(values[1]), 1.7 + 0.6 * len(values[0]))
    with panels(path, 1, size=size, title=title) as (figure, (axis,)):
        grid, texts = np.full([len(each) for each in values], np.nan), {}
        for y, x, setting in zip(*columns, settings, strict=True):
            place = values[0].index(y), values[1].index(x)
            grid[place], texts[place] = setting.mean, f"[{setting.low:.3g}, {setting.high:.3g}]"
        image = axis.imshow(grid, origin="lower", aspect="auto")
        for (y, x), text in texts.items():
            color = {"color": "k" if image.norm(grid[y, x]) > 0.6 else "w", "ha": "center"}
            axis.text(x, y, f"{grid[y, x]:.4g}", va="bottom", **color)
            axis.text(x, y - 0.06, text, va="top", fontsize="x-small", **color)
        axis.set(ylabel=names[0], xlabel=names[1])
        axis.set_yticks(range(len(values[0])), map(format_value, values[0]))
        axis.set_xticks(range(len(values[1])), map(format_value, values[1]))
        figure.colorbar(image, label="final return")


def _draw_axis(axis: Any, settings: Sequence[SweptSetting], column: list[Value], colors: Sequence[str]) -> None:
    """The settings over one axis: those of the same value side by side, and their mean."""
    means = np.array([setting.mean for setting in settings])
    errors = abs(np.array([(setting.low, setting.high) for setting in settings]).T - means)
    values = sorted(set(column))
    are_words = isinstance(values[0], str)
    is_log = not are_words and values[0] > 0 and values[-1] >= 10 * values[0]
    places = np.arange(len(values)) if are_words else np.log10(values) if is_log else np.array(values)
    where = np.array([values.index(value) for value in column])
    order = np.array([np.sum(where[:i] == place) for i, place in enumerate(where)])  # among those of the same value
    most = order.max() + 1
    gap = np.diff(places).min() if len(places) > 1 else 1.0
    x = places[where] + 0.4 * gap * ((order + 0.5) / most - 0.5)
    for i, color in enumerate(dict.fromkeys(colors)):
        those = np.array([each == color for each in colors])
        style = {"color": f"C{i}", "markersize": 4, "elinewidth": 0.8, "capsize": 2}
        axis.errorbar(x[those], means[those], errors[:, those], fmt="o", label=color or None, **style)
    if most > 1:
        of_value = [means[where == i][np.isfinite(means[where == i])] for i in range(len(values))]
        of_value = [each.mean() if len(each) else np.nan for each in of_value]
        axis.plot(places, of_value, "_-", color="0.3", markersize=14, linewidth=0.8, label="mean over the other axes")
    if len(values) <= MOST_TICKS:
        axis.set_xticks(places, map(format_value, values), rotation=30 if len(values) > 6 else 0)
    elif is_log:
        decades = np.arange(np.floor(places[0]), np.ceil(places[-1]))
        ticks = [tick for tick in np.sort([*decades, *(decades + np.log10(3))]) if places[0] <= tick <= places[-1]]
        axis.set_xticks(ticks, [f"{10.0**tick:.1g}" for tick in ticks])
    margin = max(0.5 * gap, 0.05 * np.ptp(places))
    axis.set_xlim(places.min() - margin, places.max() + margin)


def _comparable(column: Sequence[Value]) -> list[Value]:
    """The values of an axis; all of them as words if one is a word, such as None."""
    return [*map(format_value, column)] if any(isinstance(value, str) for value in column) else [*column]

"""Pictures of results: learning curves with intervals, and final returns over the axes of a sweep."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from grpo_jax.recording.figures import legend_below, panels, plot_settings, ranked_settings
from grpo_jax.recording.files import as_path
from grpo_jax.recording.statistics import describe_seeds
from grpo_jax.runs.result import RunResult
from grpo_jax.runs.run_spec import NAME, Setting, format_value
from grpo_jax.sweeps.runs import SweepResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_COLORS = 12
"""With more values on the first axis, its colours have no legend."""


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
    blocks = {}
    for name, each in (result if isinstance(result, Mapping) else {"": result}).items():
        if isinstance(each, SweepResult):
            ranked = {run.setting: run.result for run in each.ranking}
        else:
            ranked = ranked_settings(each)
        named = {NAME: name} if name else {}
        blocks |= {Setting(named | setting.values, setting.environment): block for setting, block in ranked.items()}
    return plot_settings(blocks, None if path is None else as_path(path), metric)


def plot_axes(result: SweepResult, path: Path) -> None:
    """A panel for each axis, with the mean return of each setting and its 95% interval."""
    settings, names = result.settings, [*result.settings[0].values]
    means = np.array([setting.mean for setting in settings])
    errors = abs(np.array([setting.interval for setting in settings]).T - means)
    columns = [[setting.values[name] for setting in settings] for name in names]
    # Values of which one is a word, such as None, are all words.
    columns = [[*map(format_value, each)] if str in map(type, each) else each for each in columns]
    colors = [*map(format_value, columns[0])] if len(names) > 1 else [""] * len(settings)
    title = f"{result.environment}: {describe_seeds(result.num_seeds)}"
    with panels(path, len(names), size=(4.8, 3.6), columns=4, title=title, sharey=True) as (figure, axes):
        for name, column, axis in zip(names, columns, axes, strict=True):
            for color in dict.fromkeys(colors):  # one for each value of the first axis
                those = [i for i, each in enumerate(colors) if each == color]
                x, label = [column[i] for i in those], f"{names[0]}={color}" if color else None
                style = {"fmt": "o", "markersize": 4, "elinewidth": 0.8, "capsize": 2, "alpha": 0.7}
                axis.errorbar(x, means[those], errors[:, those], label=label, **style)
            if type(column[0]) is not str and min(column) > 0 and max(column) >= 10 * min(column):
                axis.set_xscale("log")
            axis.set(xlabel=name)
        figure.supylabel("final return", fontsize="medium")
        if 1 < len(set(colors)) <= MOST_COLORS:
            legend_below(figure, axes)

"""Pictures of results: learning curves with intervals, and final returns over the axes of a sweep."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from grpo_jax.errors import ConfigError
from grpo_jax.recording.figures import panels, plot_settings, ranked_settings
from grpo_jax.recording.files import as_path
from grpo_jax.recording.statistics import describe_seeds
from grpo_jax.runs.result import RunResult
from grpo_jax.runs.run_spec import NAME, Setting, format_value
from grpo_jax.sweeps.runs import SweepResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
        if isinstance(each, str | Path):
            raise ConfigError(f"plot takes results, not a folder; in a terminal write `grpo-jax plot {each}`")
        if isinstance(each, SweepResult):
            ranked = {run.setting: run.result for run in each.ranking}
        else:
            ranked = ranked_settings(each)
        named = {NAME: name} if name else {}
        blocks |= {Setting(named | setting.values, setting.environment): block for setting, block in ranked.items()}
    return plot_settings(blocks, None if path is None else as_path(path), metric)


def plot_axes(result: SweepResult, path: Path) -> None:
    """A heat map of the means where there are two axes in a grid; else a panel for each axis, with 95% intervals."""
    settings, names = result.settings, [*result.settings[0].values]
    columns = [[setting.values[name] for setting in settings] for name in names]
    if len(names) == 2 and len(settings) == len(set(columns[0])) * len(set(columns[1])):
        return plot_heat_map(result, path)
    means = np.array([setting.mean for setting in settings])
    errors = abs(np.array([setting.interval for setting in settings]).T - means)
    # Values of which one is a word, such as None, are all words.
    columns = [[*map(format_value, each)] if str in map(type, each) else each for each in columns]
    title = f"{result.environment}: {describe_seeds(result.num_seeds)}"
    with panels(path, len(names), size=(4.8, 3.6), columns=4, title=title, sharey=True) as (figure, axes):
        for name, column, axis in zip(names, columns, axes, strict=True):
            axis.errorbar(column, means, errors, fmt="o", markersize=4, elinewidth=0.8, capsize=2, alpha=0.7)
            if type(column[0]) is not str and min(column) > 0 and max(column) >= 10 * min(column):
                axis.set_xscale("log")
            axis.set(xlabel=name)
        figure.supylabel("final return", fontsize="medium")


def plot_heat_map(result: SweepResult, path: Path) -> None:
    """The settings of a grid of two axes, the first one upwards; each cell has the mean and its interval."""
    (y_name, x_name), settings = result.settings[0].values, {(*run.values.values(),): run for run in result.settings}
    y_values, x_values = (list(dict.fromkeys(values)) for values in zip(*settings, strict=True))
    means = np.array([[settings[y, x].mean for x in x_values] for y in y_values])
    title = f"{result.environment}: {describe_seeds(result.num_seeds)}"
    size = 2.4 + 1.1 * len(x_values), 1.7 + 0.6 * len(y_values)
    with panels(path, 1, size=size, title=title) as (figure, (axis,)):
        image = axis.imshow(means, origin="lower", aspect="auto")
        for i, j in np.ndindex(means.shape):
            low, high = settings[y_values[i], x_values[j]].interval
            color = "k" if image.norm(means[i, j]) > 0.6 else "w"
            text = f"{means[i, j]:.4g}\n[{low:.3g}, {high:.3g}]"
            axis.text(j, i, text, ha="center", va="center", fontsize="small", color=color)
        axis.set(ylabel=y_name, xlabel=x_name)
        axis.set_yticks(range(len(y_values)), map(format_value, y_values))
        axis.set_xticks(range(len(x_values)), map(format_value, x_values))
        figure.colorbar(image, label="final return")

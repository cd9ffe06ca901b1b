"""Host: pictures of learning curves."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.recording.metrics_file import Settings
from grpo_jax.recording.statistics import Curve, learning_curve
from grpo_jax.training.evaluations import SAMPLED
from grpo_jax.training.progress import RunResult

NUM_DRAWN = 10
"""The best settings, whose curves are drawn; a sweep keeps their policies."""


def plot_run(environment: str, settings: Settings, result: RunResult, path: Path) -> None:
    """Draws the learning curve of a run, or one for each of its best settings if rows differ in them.

    Returns come from the evaluations while training, if there are any.
    """
    metrics, evaluated = result.metrics, SAMPLED in result.metrics
    returns = metrics[SAMPLED if evaluated else "episode/return_mean"]
    counts = None if evaluated else np.nan_to_num(metrics["episode/count"])
    drawn = settings.ranked(last_known(returns))[:NUM_DRAWN]
    curves = {}
    for label in drawn:
        rows = np.s_[:, settings.rows[label]]
        if not np.isnan(returns[rows]).all():
            curves[label] = learning_curve(result.steps[rows], returns[rows], None if counts is None else counts[rows])
    title = environment
    if len(settings.rows) > NUM_DRAWN:
        title += f", the best {NUM_DRAWN} of {len(settings.rows)} settings"
    kind = "evaluation" if evaluated else "training"
    draw_curves({title: curves}, path, "environment steps", len(settings.rows[drawn[0]]), of=kind)


def last_known(values: np.ndarray) -> np.ndarray:
    """The last value of each column that is not NaN, `[n, R]` to `[R]`; NaN if there is none."""
    last = len(values) - 1 - np.argmax(~np.isnan(values[::-1]), axis=0)
    return values[last, np.arange(values.shape[1])]


@contextlib.contextmanager
def panels(
    path: Path, count: int, *, size: tuple[float, float], columns: int = 5, title: str = "", **options: Any
) -> Iterator[tuple[Any, list[Any]]]:
    """A picture of `count` panels of a size in inches, in rows of at most `columns`, saved when the block ends.

    Yields matplotlib's figure and the panels' axes. `options` are passed to its `subplots`.
    """
    from matplotlib.figure import Figure  # not pyplot, which a user's program may have set up

    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    yield figure, list(axes.flat[:count])
    figure.suptitle(title, fontsize="small", color="0.4")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def draw_curve(axis: Any, curve: Curve, color: str, label: str | None = None) -> None:
    """A learning curve with its band, over steps."""
    from matplotlib.ticker import EngFormatter

    axis.plot(curve.steps, curve.mean, color=color, label=label)
    axis.fill_between(curve.steps, curve.low, curve.high, color=color, alpha=0.2, linewidth=0)
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))


def draw_curves(
    curves: Mapping[str, Mapping[str, Curve]],
    path: Path,
    over: str,
    num_seeds: int,
    *,
    of: str = "training",
    solved_at: Mapping[str, float] | None = None,
) -> None:
    """A panel for each environment, with its curves by label, and a line at the return that solves it."""
    labels = list(dict.fromkeys(label for by_label in curves.values() for label in by_label))
    size = (6.4, 4.2) if len(curves) < 4 else (4.8, 3.2)
    title = f"IQM of {num_seeds} seeds, 95% bootstrap interval"
    with panels(path, len(curves), size=size, title=title) as (_, axes):
        for (environment, by_label), axis in zip(curves.items(), axes, strict=True):
            for label, curve in by_label.items():
                draw_curve(axis, curve, f"C{labels.index(label)}", label)
            if environment in (solved_at or {}):
                axis.axhline(solved_at[environment], color="0.6", linestyle="--", linewidth=0.8, zorder=0)
            axis.set(title=environment, xlabel=f"{over} (each seed)", ylabel=f"return of {of} episodes")
            if len(by_label) > 6:  # too many for a legend inside
                axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
            elif any(by_label):
                axis.legend(frameon=False, loc="lower right")

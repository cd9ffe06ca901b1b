"""Host: pictures of learning curves."""

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_jax.errors import ConfigError, nearest
from grpo_jax.recording.files import replacement
from grpo_jax.recording.statistics import Curve, describe_seeds, learning_curve
from grpo_jax.runs.evaluations import SAMPLED
from grpo_jax.runs.progress import Chunk
from grpo_jax.runs.result import RunResult
from grpo_jax.runs.run_spec import Setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUM_DRAWN = 10
"""The most settings whose curves are drawn, the best ones; a sweep keeps their policies."""
MOST_WITH_BANDS = 4
"""Curves of one panel whose intervals can be told apart."""
RETURN = "episode/return_mean"
MEANS_OVER_EPISODES = (RETURN, "episode/length_mean")
SOLVED_AT = {
    "CartPole-v1": 475.0,
    "Acrobot-v1": -100.0,
    "MountainCar-v0": -110.0,
    "MountainCarContinuous-v0": 90.0,
    "Pendulum-v1": -250.0,
    "Catch-bsuite": 0.95,
    "DeepSea-bsuite": 0.95,
    "MemoryChain-bsuite": 0.95,
}
"""The mean return at which an environment counts as solved."""


def plot_settings(
    blocks: Mapping[Setting, Chunk | RunResult],
    path: Path | None,
    metric: str | None = None,
    *,
    over: str = "environment steps",
    score: str = "return",
) -> "Figure":
    """Draws the learning curves of the first settings, with 95% intervals over seeds: a panel for each environment.

    Args:
      blocks: of the settings, the best first.
      path: of the picture; None writes none.
      metric: by default the return of the evaluations while training, if all have some, or else of training episodes.
      over, score: what steps and returns are called.

    Raises:
      ConfigError: a setting lacks the metric.
    """
    evaluated = all(SAMPLED in block.metrics for block in blocks.values())
    name = metric or (SAMPLED if evaluated else RETURN)
    drawn = dict([*blocks.items()][:NUM_DRAWN]) if len({each.environment for each in blocks}) == 1 else blocks
    curves: dict[str, dict[str, Curve]] = {setting.environment: {} for setting in drawn}
    for label, (setting, block) in zip(differing([*drawn]), drawn.items(), strict=True):
        if name not in block.metrics:
            raise ConfigError(f"there is no metric {name!r}: {nearest(name, block.metrics)}")
        counts = np.nan_to_num(block.metrics["episode/count"]) if name in MEANS_OVER_EPISODES else None
        if not np.isnan(block.metrics[name]).all():
            curves[setting.environment][label] = learning_curve(block.steps, block.metrics[name], counts)
    note = "" if len(drawn) == len(blocks) else f"the best {NUM_DRAWN} of {len(blocks)} settings; "
    what = {SAMPLED: f"{score} of evaluation episodes", RETURN: f"{score} of training episodes"}.get(name, name)
    num_seeds = min(block.steps.shape[1] for block in drawn.values())
    return draw_curves(curves, path, over, num_seeds, what=what, note=note)


def differing(settings: Sequence[Setting]) -> list[str]:
    """Settings as texts, such as "discount=1, clip_high=0.2", without the values that all of them have."""
    shared = set.intersection(*({*each.values.items()} for each in settings)) if len(settings) > 1 else set()
    own = [{name: value for name, value in each.values.items() if (name, value) not in shared} for each in settings]
    return [str(Setting(values or each.values)) for values, each in zip(own, settings, strict=True)]


def ranked_settings(result: RunResult, environment: str = "") -> dict[Setting, Chunk]:
    """The settings of a run by the mean of their seeds' last evaluation, or final returns, the best first."""
    blocks = result.by_setting
    ranked = [*blocks]
    if len(blocks) > 1:
        evaluated = result.evaluations.sampled
        ranked = result.settings.ranked(evaluated[-1] if len(evaluated) else result.final_return)
    return {Setting(setting.values, environment): blocks[setting] for setting in ranked}


@contextlib.contextmanager
def panels(
    path: Path | None, count: int, *, size: tuple[float, float], columns: int = 5, title: str = "", **options: Any
) -> Iterator[tuple[Any, list[Any]]]:
    """A picture of `count` panels of a size in inches, in rows of at most `columns`, saved when the block ends.

    With None for the path it is not saved. Yields matplotlib's figure and the panels' axes. `options` are passed to its
    `subplots`.
    """
    import PIL.Image
    from matplotlib.figure import Figure  # not pyplot, which a user's program may have set up

    class Picture(Figure):
        """A figure that a notebook shows, also where pyplot is not used."""

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, dpi=100)
            return file.getvalue()

    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Picture(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    for axis in axes.flat[max(count - columns, 0) : count]:  # a shared axis is labelled in the last row alone
        axis.tick_params(labelbottom=True)
    yield figure, list(axes.flat[:count])
    figure.suptitle(title, fontsize="small", color="0.4")
    if path is not None:
        with replacement(path) as temporary:
            figure.savefig(temporary, dpi=130, format=path.suffix[1:] or "png")
            if path.suffix == ".png":  # a palette takes a third of the bytes, and lines and bands need no more colours
                with PIL.Image.open(temporary) as picture:
                    reduced = picture.convert("RGB").quantize(128, dither=PIL.Image.Dither.NONE)
                reduced.save(temporary, "PNG", optimize=True)


def draw_curve(axis: Any, curve: Curve, color: str, label: str | None = None, *, with_band: bool = True) -> None:
    """A learning curve, and the band of its interval, over steps; dashed over an equal one, which it would hide."""
    from matplotlib.ticker import EngFormatter

    hides = any(np.array_equal(line.get_xydata(), np.stack(curve[:2], axis=1)) for line in axis.lines)
    axis.plot(curve.steps, curve.mean, "--" if hides else "-", color=color, label=label)
    if with_band:
        axis.fill_between(curve.steps, curve.low, curve.high, color=color, alpha=0.2, linewidth=0)
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))


def legend_below(figure: Any, axes: Sequence[Any]) -> None:
    """One legend for all panels, below them, in as many columns as fit; the figure becomes higher by its lines."""
    entries = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    if not entries:
        return
    width, height = figure.get_size_inches()
    fitting = int(width / (0.085 * max(map(len, entries)) + 0.6))
    columns = min(max(fitting, 1), len(entries))
    figure.set_size_inches(width, height + 0.1 + 0.2 * -(-len(entries) // columns))
    options = {"ncols": columns, "frameon": False, "fontsize": "small"}
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", **options)


def draw_curves(
    curves: Mapping[str, Mapping[str, Curve]],
    path: Path | None,
    over: str,
    num_seeds: int,
    *,
    what: str = "return of training episodes",
    note: str = "",
) -> "Figure":
    """A panel for each environment, with its curves by label, and a line at the return that solves it."""
    labels = list(dict.fromkeys(label for by_label in curves.values() for label in by_label))
    few, seeds = max(map(len, curves.values())) <= MOST_WITH_BANDS, describe_seeds(num_seeds)
    title = note + (seeds if few else seeds.partition(",")[0])  # without bands, nothing of an interval
    size = (6.4, 4.2) if len(curves) < 4 else (4.8, 3.2)
    with panels(path, len(curves), size=size, title=title) as (figure, axes):
        for (environment, by_label), axis in zip(curves.items(), axes, strict=True):
            for label, curve in by_label.items():
                draw_curve(axis, curve, f"C{labels.index(label)}", label, with_band=few)
            solved, (low, high) = SOLVED_AT.get(environment), axis.get_ylim()
            if solved is not None and what.startswith("return") and solved < high + 0.5 * (high - low):
                axis.axhline(solved, color="0.6", linestyle="--", linewidth=0.8, zorder=0)
            axis.set(title=environment, xlabel=f"{over} (each seed)", ylabel=what)
        legend_below(figure, axes)
    return figure

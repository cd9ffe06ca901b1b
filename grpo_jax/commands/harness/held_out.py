"""Means over held-out prompts along a run of a language model: a table of the first and the last, and curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.commands.harness.figures import with_interval
from grpo_jax.recording import Curve, bootstrap_interval, iqm
from grpo_jax.recording.figures import draw_curve, panels

Point = Mapping[str, Any]
"""A measurement: `iteration`, and for each seed `tokens`, `rewards` and `greedy` by name, `length`, `pass_at_k`."""


def series(point: Point) -> dict[str, np.ndarray]:
    """The means of a point by what they are of, each `[num_seeds]`."""
    means = {f"{name}, sampled": values for name, values in point["rewards"].items()}
    means |= {f"{name}, greedy": values for name, values in point["greedy"].items()}
    means |= {f"pass@{k}": values for k, values in point["pass_at_k"].items() if k != "1"}
    return {name: np.asarray(values) for name, values in means.items()}


def before_and_after(points: Sequence[Point]) -> list[list[str]]:
    """Rows of the name of each mean, its value in the first point, and in the last; of several seeds with intervals."""

    def cell(values: np.ndarray) -> str:
        return f"{values[0]:.3f}" if len(values) == 1 else with_interval(values, ".3f")

    first, last = ({**series(point), "tokens": np.asarray(point["length"])} for point in (points[0], points[-1]))
    return [[name, cell(first[name]), cell(last[name])] for name in first]


def draw_points(points: Sequence[Point], path: Path) -> None:
    """Draws each mean over the sampled tokens of a seed: a panel for samples, one for greedy completions and pass@k."""
    names = list(series(points[0]))
    left = [name for name in names if name.endswith(", sampled")]
    groups = [left, [name for name in names if name not in left]]
    steps, num_seeds = np.mean([point["tokens"] for point in points], axis=1), len(points[0]["tokens"])
    title = f"Held-out prompts: IQM of {num_seeds} seeds, 95% bootstrap interval" if num_seeds > 1 else ""
    with panels(path, 2, size=(6.2, 3.4), title=title, sharey=True) as (_, axes):
        for axis, group in zip(axes, groups, strict=True):
            for number, name in enumerate(group):
                values = [series(point)[name] for point in points]
                low, high = zip(*map(bootstrap_interval, values), strict=True)
                draw_curve(axis, Curve(steps, np.array([iqm(each) for each in values]), low, high), f"C{number}", name)
            axis.set(xlabel="tokens sampled (each seed)")
            axis.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
        axes[0].set_ylabel("mean")

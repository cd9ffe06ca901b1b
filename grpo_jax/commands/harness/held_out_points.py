"""What the measurements of held-out prompts along a run say: before and after, a picture, collapse or sharpening."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.commands.harness.figures import with_interval
from grpo_jax.errors import ConfigError
from grpo_jax.recording import Curve, bootstrap_interval, iqm
from grpo_jax.recording.figures import draw_curve, panels
from grpo_jax.recording.files import check_fields, read_as

_MEANS = list[float | None]
_KINDS = {
    **{"iteration": int, "tokens": list[int], "seconds": dict[str, float], "cut": _MEANS, "all_equal": _MEANS},
    **{"length": _MEANS, "length_of_correct": _MEANS},
    **{name: dict[str, _MEANS] for name in ("rewards", "greedy", "pass_at_k")},
}

Point = Mapping[str, Any]
"""A measurement: `iteration`, and for each seed `tokens`, `rewards` and `greedy` by name, `length`, `pass_at_k`."""


def read_points(path: Path) -> list[Point]:
    """The measurements of a file; ConfigError if it is damaged."""
    points, num_seeds = read_as(path, list[dict[str, Any]]), set()
    for point in points:
        check_fields(path, point, _KINDS)
        means = (point["length"], point["cut"], *point["rewards"].values(), *point["pass_at_k"].values())
        num_seeds |= {*map(len, means)}
    if len(num_seeds) > 1:
        raise ConfigError(f"{path} is damaged: it has means of {sorted(num_seeds)} seeds")
    return points


def diagnose(points: Sequence[Point], num_prompts: int) -> str | None:
    """Whether a policy whose samples hardly differ in reward has sharpened or collapsed; None if they differ.

    A collapse is a fall of pass@k, with the largest k, since the first point by more than two standard errors, in a
    policy whose samples of a prompt are all right or all wrong for more than half of the prompts; the same without a
    fall, and with a rise of pass@1 by more than that, is sharpening.
    """
    if len(points) < 2 or (equal := np.mean(points[-1]["all_equal"])) <= 0.5:
        return None
    k = max(points[-1]["pass_at_k"], key=int)
    first, last = ({name: np.mean(point["pass_at_k"][name]) for name in ("1", k)} for point in (points[0], points[-1]))
    count = num_prompts * len(points[-1]["length"])
    error = {name: math.sqrt(sum(each[name] * (1 - each[name]) for each in (first, last)) / count) for name in first}
    where = f"{equal:.0%} of the held-out prompts have samples of equal reward"
    passes = f"pass@{k} went from {first[k]:.3f} to {last[k]:.3f}, pass@1 from {first['1']:.3f} to {last['1']:.3f}"
    if first[k] - last[k] > 2 * error[k]:
        advice = "Try a lower --learning-rate, a higher --entropy-coef or --kl-coef, or more --num-prompts"
        return f"warning: the policy has collapsed: {passes}, and {where}. {advice}."
    if last["1"] - first["1"] > 2 * error["1"]:
        return f"The policy has sharpened: {passes}, and {where}."
    return None


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

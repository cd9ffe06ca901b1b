"""What the measurements of held-out prompts along a run say: before and after, a picture, collapse or sharpening."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.errors import ConfigError
from grpo_jax.recording.figures import draw_curve, panels
from grpo_jax.recording.files import read_json
from grpo_jax.recording.statistics import Curve, bootstrap_interval, describe_seeds, iqm
from grpo_jax.types import by_path

Point = Mapping[str, Any]
"""A measurement: `iteration`, and for each seed `tokens`, `rewards` with `errors` and `greedy` by name, `length`,
`pass_at_k`."""


def read_points(path: Path, names: Sequence[str], ks: Sequence[int], num_seeds: int) -> list[Point]:
    """The measurements in a file, none without it; ConfigError if they are not of these rewards, k and seeds."""
    points, seeds = read_json(path, list[dict[str, Any]]) if path.exists() else [], np.zeros(num_seeds).tolist()
    like = {"iteration": 0, "pass_at_k": dict.fromkeys(map(str, ks), seeds)}
    like |= dict.fromkeys(("rewards", "errors", "greedy"), dict.fromkeys(names, seeds))
    like |= dict.fromkeys(("tokens", "length", "cut", "all_equal"), seeds)
    for point in points:
        found = {name for name, value in by_path(point).items() if type(value) in (int, float)}
        if others := ", ".join(sorted(found ^ by_path(like).keys())):
            advice = "resume with the --reward, --num-seeds and --num-samples of before; a damaged file, move away"
            raise ConfigError(f"{path} lacks numbers of this run, or has others: {others:.200}; {advice}")
    return points


def advise(first: Point, reward: str, differ: bool) -> str:
    """What a pass@k of 0 before training means, whether or not completions of a prompt differ in their whole reward."""
    k = max(first["pass_at_k"], key=int)
    if np.any(first["pass_at_k"][k]):
        return ""
    if differ:
        return f"No completion earns the whole {reward} (pass@{k} is 0), but rewards differ, which teaches something."
    return (
        f"warning: the model never earns {reward} (pass@{k} is 0), and completions of equal reward teach nothing. Try "
        "simpler prompts, examples in the prompt, partial credit, more samples (--group-size), or, if completions are "
        "cut, a --stop-string or a larger --max-completion: grpo-jax docs language_models"
    )


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
    """The means of a point by what they are of, each `[num_seeds]`; the last is the number of tokens."""
    means = {f"{name}, sampled": values for name, values in point["rewards"].items()}
    means |= {f"{name}, greedy": values for name, values in point["greedy"].items()}
    means |= {f"pass@{k}": values for k, values in point["pass_at_k"].items() if k != "1"}
    return {name: np.asarray(values) for name, values in {**means, "tokens": point["length"]}.items()}


def before_and_after(points: Sequence[Point]) -> list[list[str]]:
    """Rows of the name of each mean, its value in the first point, and in the last, with intervals that are known."""

    def cell(point: Point, name: str) -> str:
        mean, low, high = interval(point, name)
        return f"{mean:.3f} [{low:.3f}, {high:.3f}]" if high > low else f"{mean:.3f}"

    return [[name, cell(points[0], name), cell(points[-1], name)] for name in series(points[0])]


def interval(point: Point, name: str) -> tuple[float, float, float]:
    """The mean of a series and its interval: a bootstrap over seeds, or of one two standard errors over prompts."""
    values = series(point)[name]
    error = 2 * point.get("errors", {}).get(name.removesuffix(", sampled"), [0.0])[0]
    around = bootstrap_interval(values) if len(values) > 1 else (values[0] - error, values[0] + error)
    return iqm(values), *around


def draw_points(points: Sequence[Point], path: Path, measured_on: str = "held-out prompts") -> None:
    """Draws each mean over the sampled tokens of a seed: a panel for samples, one for greedy completions and pass@k."""
    *names, _ = series(points[0])
    left = [name for name in names if name.endswith(", sampled")]
    groups = [left, [name for name in names if name not in left]]
    steps, num_seeds = np.mean([point["tokens"] for point in points], axis=1), len(points[0]["tokens"])
    spread = describe_seeds(num_seeds) if num_seeds > 1 else "two standard errors over prompts"
    with panels(path, 2, size=(6.2, 3.4), title=f"{measured_on}: {spread}", sharey=True) as (_, axes):
        for axis, group in zip(axes, groups, strict=True):
            for number, name in enumerate(group):
                mean, low, high = zip(*(interval(point, name) for point in points), strict=True)
                draw_curve(axis, Curve(steps, np.array(mean), low, high), f"C{number}", name)
                axis.lines[-1].set_marker("o")
            axis.set(xlabel="tokens sampled (each seed)")
            axis.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
        axes[0].set(ylabel="mean")
        axes[0].update_datalim([(0, 0), (0, 1)])  # all of it, so that noise does not look like a rise
        axes[0].autoscale_view()

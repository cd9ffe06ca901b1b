"""The configurations of a sweep, from the flags of a command line: a grid, or random points."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.harness.figures import shown
from experiments.harness.flags import Settings, parse
from experiments.harness.runs import Plan
from grpo_jax import Hyperparams
from grpo_jax.errors import ConfigError

TAKES_SEVERAL = ("hidden_sizes", "env_params")  # fields whose several values are one setting, hence never an axis


class Sweep(NamedTuple):
    """The runs to be made, and where each lies on the axes."""

    axes: tuple[str, ...]  # names of the fields that vary
    points: list[tuple[float | str, ...]]  # of each plan, a value for each axis
    plans: list[Plan]


def make_sweep(flags: Sequence[str], samples: int | None = None, seed: int = 0) -> Sweep:
    """The runs that flags of experiments.train ask for, where several values of a flag make it an axis.

    Args:
      flags: such as `["--learning-rate", "1e-4", "1e-3", "--num-envs", "64"]`.
      samples: how many points to draw, of each combination of `Config` fields; None takes the whole grid.
      seed: of the draws.

    Raises:
      ConfigError: nothing varies, a value is not a number or comes twice, or the ends of a range are not
        0 < low < high.
    """
    values = _values_of(flags)
    axes = {name: words for name, words in values.items() if len(words) > 1 and name not in TAKES_SEVERAL}
    fixed = [word for name, words in values.items() if name not in axes for word in (flag_of(name), *words)]
    if not axes:
        raise ConfigError("nothing to sweep: give a flag several values, such as --learning-rate 1e-4 1e-3 1e-2")
    if "environment" in axes or "config" in axes:
        raise ConfigError("returns of different environments cannot be ranked: use one --environment, or one --config")
    static = {name: words for name, words in axes.items() if name not in Hyperparams.__dataclass_fields__}
    traced = {name: [_number(word) for word in words] for name, words in axes.items() if name not in static}
    for name, numbers in traced.items():
        if not all(isinstance(number, float) for number in numbers):
            raise ConfigError(f"{flag_of(name)} {' '.join(axes[name])}: not all of them are numbers")
    settings = list(itertools.product(*traced.values())) if samples is None else _draws(traced, samples, seed)

    sweep = Sweep((*static, *traced), [], [])
    for combination in itertools.product(*static.values()):
        chosen = [word for name, value in zip(static, combination, strict=True) for word in (flag_of(name), value)]
        base = parse(Settings, fixed + chosen)
        for setting in settings:
            point = (*map(_number, combination), *setting)
            label = ", ".join(f"{name}={shown(value)}" for name, value in zip(sweep.axes, point, strict=True))
            hyperparams = base.hyperparams.replace(**dict(zip(traced, setting, strict=True)))
            sweep.points.append(point)
            sweep.plans.append(Plan(label, base.config, hyperparams))
    _check_distinct(sweep, len(static))
    return sweep


def _check_distinct(sweep: Sweep, num_static: int) -> None:
    """Raises ConfigError if two plans are one run, however their values are written: of float32 they are equal."""
    labels: dict[tuple, str] = {}
    for point, plan in zip(sweep.points, sweep.plans, strict=True):
        run = plan.config, *map(np.float32, point[num_static:])
        if run in labels:
            raise ConfigError(
                f"the sweep has a value twice: {labels[run]} and {plan.label} are the same run; leave one of them out"
            )
        labels[run] = plan.label


def _values_of(flags: Sequence[str]) -> dict[str, list[str]]:
    """The words that follow each flag; of a flag that comes twice, the later ones."""
    values: dict[str, list[str]] = {}
    for word in flags:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            values[name := name.replace("-", "_")] = [value] if value else []
        elif not values:
            raise ConfigError(f"{word!r} follows no flag; write --name value value ...")
        else:
            values[name].append(word)
    return values


def flag_of(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def _number(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word


def _draws(ranges: dict[str, list[float]], samples: int, seed: int) -> list[tuple[float, ...]]:
    """Distinct points drawn log-uniformly, rounded to four digits if they suffice, so that they can be written down."""
    for name, ends in ranges.items():
        if len(ends) != 2 or not 0 < ends[0] < ends[1] < math.inf:
            raise ConfigError(
                f"{flag_of(name)} {' '.join(map(shown, ends))} is no range to draw from on a logarithmic scale; use "
                "two values, 0 < low < high"
            )
    if samples < 1 or not ranges:
        raise ConfigError(f"--samples {samples}: use at least 1, and a range such as --learning-rate 1e-4 1e-2")
    low, high = np.log(np.array(list(ranges.values()))).T
    drawn = np.exp(np.random.default_rng(seed).uniform(low, high, size=(samples, len(ranges))))
    for digits in range(4, 10):  # nine tell any two numbers of float32 apart
        points = [tuple(float(f"{value:.{digits}g}") for value in row) for row in drawn]
        if len(set(points)) == samples:
            break
    return points

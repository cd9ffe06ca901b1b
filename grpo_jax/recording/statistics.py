"""Host: robust averages over seeds and their uncertainty, on plain NumPy arrays.

Agarwal et al., Deep RL at the Edge of the Statistical Precipice, https://arxiv.org/abs/2108.13264
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

NUM_RESAMPLES = 2000
"""Times that the runs are redrawn."""


class Curve(NamedTuple):
    """A learning curve over seeds, every field `[num_points]`."""

    steps: np.ndarray  # environment steps of one seed, the common grid
    mean: np.ndarray  # interquartile mean over seeds
    low: np.ndarray  # 95% interval of that mean: bootstrap over seeds
    high: np.ndarray


def iqm(scores: ArrayLike, *, axis: int | None = None) -> np.ndarray:
    """Interquartile mean: the mean of the middle half of the sorted scores.

    Cuts `floor(n / 4)` of the `n` scores at each end, which is the published convention
    (`scipy.stats.trim_mean(scores, 0.25)`): where `n / 4` is not whole, a little more than half stays.

    Args:
      scores: any shape; runs and tasks alike.
      axis: the axis to average over; None takes all entries together.

    Returns:
      The mean, float64, without `axis`. NaN where any score is NaN: a failed run is never trimmed away unseen.
    """
    scores = np.asarray(scores, np.float64)
    scores = scores.reshape(-1) if axis is None else np.moveaxis(scores, axis, -1)
    n = scores.shape[-1]
    if n == 0:
        raise ValueError("iqm needs at least one score, got none.")
    cut = n // 4
    middle = np.partition(scores, (cut, n - cut - 1), axis=-1)[..., cut : n - cut]
    return np.where(np.isnan(scores).any(axis=-1), np.nan, middle.mean(axis=-1))[()]


def bootstrap_interval(scores: ArrayLike) -> tuple[float, float]:
    """The 95% interval of the interquartile mean of scores `[num_runs]`: percentiles of a bootstrap (section 4.1).

    One run gives an interval of width 0, which says nothing about other runs. Any NaN score gives `(nan, nan)`.
    """
    scores = np.asarray(scores, np.float64)
    if scores.ndim != 1 or scores.size == 0:
        raise ValueError(f"scores must be [num_runs] and not empty, got shape {scores.shape}.")
    if np.isnan(scores).any():
        return np.nan, np.nan
    drawn = np.random.default_rng(0).integers(len(scores), size=(NUM_RESAMPLES, len(scores)))
    low, high = percentiles(iqm(scores[drawn], axis=-1))
    return float(low), float(high)


def estimate(scores: ArrayLike) -> tuple[float, ...]:
    """The interquartile mean of scores `[num_runs]` and the ends of its 95% interval; of one score only itself."""
    return (float(iqm(scores)), *(bootstrap_interval(scores) if np.size(scores) > 1 else ()))


def probability_of_improvement(x: ArrayLike, y: ArrayLike) -> tuple[float, float, float]:
    """P(X > Y) + P(X = Y) / 2 for runs X and Y of two algorithms, of scores `[num_runs]`, and its 95% interval.

    Section 4.3 of https://arxiv.org/abs/2108.13264. NaN where any score is NaN.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if np.isnan(x).any() or np.isnan(y).any():
        return np.nan, np.nan, np.nan
    wins = (x[:, None] > y) + 0.5 * (x[:, None] == y)
    generator = np.random.default_rng(0)
    # The share of each run in each resample is all that a resample is: a bilinear form, with no array of all pairs.
    times_x, times_y = (generator.multinomial(n, np.full(n, 1 / n), size=NUM_RESAMPLES) / n for n in wins.shape)
    low, high = percentiles(np.einsum("ri,ri->r", times_x @ wins, times_y))
    return float(wins.mean()), float(low), float(high)


def describe_estimate(numbers: tuple[float, ...], spec: str = ".4g") -> str:
    """Such as "493.7 [489.1, 497]"; of one score "493.7"."""
    mean, *ends = (f"{number:{spec}}" for number in numbers)
    return f"{mean} [{', '.join(ends)}]" if ends else mean


def describe_seeds(num_seeds: int) -> str:
    """What is shown of so many seeds, for the title of a picture: also that they are too few.

    The median of a distribution is outside the range of n draws with probability `2^(1 - n)`, and a bootstrap interval
    is inside it: with five seeds, none holds the median with 95%.
    """
    if num_seeds == 1:
        return "1 seed: too few to know the spread"
    note = "" if num_seeds >= 6 else "\ntoo few seeds: with fewer than 6, intervals are too narrow"
    return f"IQM of {num_seeds} seeds, 95% interval{note}"


def pass_at_k(correct: ArrayLike, k: int) -> np.ndarray:
    """Chance that at least one of `k` answers is right, estimated from `n >= k` of them.

        1 - C(n - c, k) / C(n, k), where c of the n are right

    The unbiased estimator of https://arxiv.org/abs/2107.03374, equation 1, averaged over prompts.

    Args:
      correct: `[..., num_prompts, n]` bool.
      k: from 1 to n.

    Returns:
      `[...]`, float64.
    """
    correct = np.asarray(correct, np.float64)
    n = correct.shape[-1]
    if not 1 <= k <= n:
        raise ValueError(f"k={k} is not from 1 to the {n} answers of each prompt.")
    wrong = n - correct.sum(axis=-1)
    none_right = np.prod([np.maximum(wrong - i, 0) / (n - i) for i in range(k)], axis=0)
    return (1 - none_right).mean(axis=-1)


def learning_curve(
    steps: ArrayLike,
    returns: ArrayLike,
    counts: ArrayLike | None = None,
    *,
    num_points: int = 100,
) -> Curve:
    """The interquartile mean over seeds of the return, with its 95% interval, over environment steps.

    Each seed is interpolated linearly between its own points onto one grid, from the earliest point of any seed to the
    last step of the one that went furthest. Outside its own points a seed holds its first or last value. The interval
    redraws whole seeds, not points.

    Args:
      steps: `[num_iterations, num_seeds]`, cumulative environment steps of each seed after each iteration. Rows in
        which a seed did not advance are padding and left out for that seed.
      returns: `[num_iterations, num_seeds]`, mean return of the episodes that ended; NaN where none did: left out.
      counts: `[num_iterations, num_seeds]`, of how many episodes. With them a seed's own points are means over all
        episodes in each of `num_points` equal parts of its steps. Without them each iteration is a point, and where
        few long episodes end in one iteration and many short ones in another, both weigh the same.
      num_points: points of the grid.

    Returns:
      A `Curve`. A seed without any return is left out; where no seed has one, mean, low and high are NaN. With one
      seed, low and high equal the mean.

    Raises:
      ValueError: shapes differ or are empty, steps fall, or no seed advanced.
    """
    steps, returns, advanced = checked(steps, returns)
    if not advanced.any():
        raise ValueError("no seed made an environment step: there is no curve to draw.")
    usable = advanced & ~np.isnan(returns)
    if counts is not None:
        counts = np.asarray(counts, np.float64)
        usable &= counts > 0
    seeds = np.flatnonzero(usable.any(axis=0))
    grid = np.linspace(steps[usable if len(seeds) else advanced].min(), steps.max(), num_points)
    if len(seeds) == 0:
        return Curve(grid, *np.full((3, num_points), np.nan))
    points = [[x[usable[:, i], i] for x in (steps, returns)] for i in seeds]
    if counts is not None:
        points = [_pooled(*own, counts[usable[:, i], i], num_points) for i, own in zip(seeds, points, strict=True)]
    values = np.stack([np.interp(grid, *own) for own in points], axis=-1)
    drawn = np.random.default_rng(0).integers(len(seeds), size=(NUM_RESAMPLES, len(seeds)))
    # One point at a time: all at once takes gigabytes with hundreds of seeds.
    low, high = zip(*(percentiles(iqm(at_point[drawn], axis=-1)) for at_point in values), strict=True)
    return Curve(grid, iqm(values, axis=-1), np.array(low), np.array(high))


def percentiles(statistics: np.ndarray) -> np.ndarray:
    """The two ends of the central 95% of `statistics`."""
    return np.quantile(statistics, [0.025, 0.975])


def checked(steps: ArrayLike, returns: ArrayLike) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Both as arrays `[num_iterations, num_seeds]`, and where a seed made environment steps; or an error."""
    steps, returns = np.asarray(steps), np.asarray(returns, np.float64)
    if steps.shape != returns.shape or steps.ndim != 2 or steps.size == 0:
        shapes = f"{steps.shape} and {returns.shape}"
        raise ValueError(f"steps and returns must both be [num_iterations, num_seeds] and not empty, got {shapes}.")
    made = np.diff(steps, axis=0, prepend=0)
    if (made < 0).any():
        raise ValueError("steps must be cumulative: they fall from one iteration to the next in at least one seed.")
    return steps, returns, made > 0


def _pooled(
    steps: np.ndarray, returns: np.ndarray, counts: np.ndarray, num_parts: int
) -> tuple[np.ndarray, np.ndarray]:
    """A point for each part of a seed's steps in which episodes ended: its last step, and the mean over all of them."""
    part = np.ceil(steps * (num_parts / steps[-1])).astype(int)
    number = np.bincount(part, counts)
    total, last = np.bincount(part, returns * counts), np.zeros(len(number))
    np.maximum.at(last, part, steps)
    ended = number > 0
    return last[ended], total[ended] / number[ended]

"""The metrics of runs by setting, seed and iteration: as arrays, and as a table of pandas."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from grpo_jax.errors import ConfigError
from grpo_jax.runs.settings import Setting

if TYPE_CHECKING:
    import pandas

STEPS = "environment_steps"
"""The name of the environment steps since the start of a run, beside its metrics."""


class Block(NamedTuple):
    """The seeds of one setting."""

    steps: np.ndarray  # [n, S]
    metrics: Mapping[str, np.ndarray]  # each [n, S]


def stacked(blocks: Sequence[Block]) -> dict[str, np.ndarray]:
    """Each metric as `[settings, seeds, iterations]`, float64; NaN where a setting has fewer seeds or iterations."""
    names = dict.fromkeys([STEPS, *(name for block in blocks for name in block.metrics)])
    most = [max(block.steps.shape[axis] for block in blocks) for axis in (1, 0)]
    curves = {name: np.full((len(blocks), *most), np.nan) for name in names}
    for i, block in enumerate(blocks):
        num_iterations, num_seeds = block.steps.shape
        for name, values in {STEPS: block.steps, **block.metrics}.items():
            curves[name][i, :num_seeds, :num_iterations] = values.T
    return curves


def as_dataframe(blocks: Mapping[Setting, Block]) -> "pandas.DataFrame":
    """A line for each iteration of each seed: its setting's values, `seed`, `iteration`, `environment_steps`, metrics.

    Raises:
      ConfigError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise ConfigError(
            "to_dataframe() needs pandas, which is not installed: pip install pandas; or use curves(), which are arrays"
        ) from error
    frames = []
    for setting, (steps, metrics) in blocks.items():
        num_iterations, num_seeds = steps.shape
        made = metrics.get("environment/steps", np.ones(steps.shape)) > 0  # not after the end of a seed
        columns = {name: np.full(steps.size, value) for name, value in setting.values.items()}
        columns |= {"seed": np.repeat(np.arange(num_seeds), num_iterations)}
        columns |= {"iteration": np.tile(np.arange(num_iterations), num_seeds)}
        columns |= {name: each.T.reshape(-1) for name, each in {STEPS: steps, **metrics}.items()}
        frames.append(pandas.DataFrame(columns)[made.T.reshape(-1)])
    return pandas.concat(frames, ignore_index=True)

"""The result of a run: its metrics by setting, seed and iteration, as arrays and as a table of pandas."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from grpo_jax.runs.evaluations import Evaluations
from grpo_jax.runs.progress import Chunk
from grpo_jax.runs.run_spec import Setting, Settings, list_first
from grpo_jax.types import TrainState

if TYPE_CHECKING:
    import pandas

STEPS = "environment_steps"
"""The name of the environment steps since the start of a run, beside its metrics."""
NUM_EPISODES = 100
"""The fewest episodes of a row that decide its score, if it had as many."""


class RunResult(NamedTuple):
    """The result of `run`. After `resume_from`, metrics and steps are of the iterations made since."""

    states: TrainState  # as in Progress
    metrics: dict[str, np.ndarray]  # each [num_iterations, R]; empty if there was nothing left to do
    steps: np.ndarray  # int64 [num_iterations, R]
    compile_seconds: float
    train_seconds: float  # with evaluations, callbacks, and the time before `resume_from`
    evaluations: Evaluations  # with those before `resume_from`
    # str [R]: what ended the row: a limit, "total_steps", "num_iterations" or "max_episodes", or "stopped", by
    # `stop_when` or the callback
    ended_by: np.ndarray
    used: np.ndarray  # float64 [R] fraction that it used of this limit, or of the budget, if it was stopped
    settings: Settings | None = None  # which rows have the same hyperparameters and env_params

    def __repr__(self) -> str:
        """How the run ended, and the final returns of the best ten settings."""
        settings, returns = self.settings, self.final_return
        ends = describe_ends(self.ended_by, self.used, settings.word)
        lines = [f"RunResult: {len(returns)} {settings.word}, {len(self.steps)} iterations, {ends}"]
        for setting in settings.ranked(returns)[:10]:
            seeds = list_first([f"{each:.4g}" for each in returns[settings.rows[setting]]])
            lines.append(f"  final_return {seeds} {setting}".rstrip())
        return "\n".join(lines)

    @property
    def final_return(self) -> np.ndarray:
        """float64 `[R]`: the mean return of the last 100 training episodes of each row, whenever it ended.

        They are the episodes of its last iterations in which 100 or more ended, or all that it had; NaN if none ended.
        Returns of evaluations are in `evaluations`.
        """
        return final_return([self], self.steps.shape[1])

    @property
    def by_setting(self) -> dict[Setting, Chunk]:
        """The metrics and steps of each setting, whose columns are its seeds."""
        return {setting: columns_of(self, rows) for setting, rows in self.settings.rows.items()}

    def to_dataframe(self) -> "pandas.DataFrame":
        """A table of pandas, with a line for each iteration of each row.

        Its columns are the hyperparameters and env_params in which rows differ, `seed`, `iteration`,
        `environment_steps` and the metrics. pandas must be installed; `by_setting` has arrays.
        """
        return as_dataframe(self.by_setting)


def final_return(parts: Sequence[Chunk | RunResult], num_rows: int) -> np.ndarray:
    """The mean return `[R]` of each row's last 100 or more episodes in successive parts of a run, NaN without any."""
    names = "episode/return_mean", "episode/count"  # means over the episodes that ended in an iteration, their number
    known = [part.metrics for part in parts if names[1] in part.metrics]
    returns, counts = (np.concatenate([np.zeros((0, num_rows)), *(each[name] for each in known)]) for name in names)
    counts = np.nan_to_num(counts)
    ended_later = np.cumsum(counts[::-1], axis=0)[::-1] - counts
    counts = np.where(ended_later < NUM_EPISODES, counts, 0.0)
    returns = np.where(counts > 0, returns, 0.0)  # NaN of earlier iterations does not count
    with np.errstate(invalid="ignore"):  # 0 / 0 is NaN
        return (returns * counts).sum(axis=0) / counts.sum(axis=0)


def columns_of(part: Chunk | RunResult, rows: np.ndarray) -> Chunk:
    """The metrics and steps of some of the rows."""
    return Chunk({name: values[:, rows] for name, values in part.metrics.items()}, part.steps[:, rows], 0, 0.0)


def joined(parts: Sequence[Chunk | RunResult], num_rows: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The metrics and the steps of successive parts of a run; a metric is NaN in a part that lacks it."""
    parts = [part for part in parts if len(part.steps)]

    def values(name, part):
        return part.metrics.get(name, np.full(part.steps.shape, np.nan, np.float32))

    names = dict.fromkeys(name for part in parts for name in part.metrics)
    metrics = {name: np.concatenate([values(name, part) for part in parts]) for name in names}
    return metrics, np.concatenate([np.zeros((0, num_rows), np.int64), *(part.steps for part in parts)])


def as_dataframe(parts: Mapping[Setting, Chunk | RunResult]) -> "pandas.DataFrame":
    """A line for each iteration of each seed: its setting, `seed`, `iteration`, `environment_steps` and metrics."""
    import pandas

    frames = []
    for setting, part in parts.items():
        iteration, seed = np.indices(part.steps.shape)
        columns: dict[str, Any] = {"seed": seed, "iteration": iteration, STEPS: part.steps, **part.metrics}
        table = pandas.DataFrame(dict(setting.values) | {name: each.T.reshape(-1) for name, each in columns.items()})
        made = part.metrics.get("environment/steps", np.ones(part.steps.shape)) > 0  # not after the end of a seed
        frames.append(table[made.T.reshape(-1)])
    return pandas.concat(frames, ignore_index=True)


def describe_ends(ended_by: np.ndarray, used: np.ndarray, word: str = "seeds") -> str:
    """What ended rows, and how much of their budgets they used, such as "98.1% of total_steps used"."""
    texts = []
    for name in sorted(set(ended_by)):
        rows = ended_by == name
        percent = f"{100 * used[rows].mean():.1f}%"
        text = f"stopped at {percent} of the budget" if name == "stopped" else f"{percent} of {name} used"
        texts.append(text if rows.all() else f"{text} in {rows.sum()} of {len(rows)} {word}")
    return ", ".join(texts)

"""The progress of a run, chunk by chunk, and its result."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from grpo_jax.errors import ConfigError
from grpo_jax.objectives.reductions import missing
from grpo_jax.runs.curves import Block, as_dataframe, stacked
from grpo_jax.runs.evaluations import GREEDY, SAMPLED, Evaluations, no_evaluations
from grpo_jax.runs.settings import Setting, Settings
from grpo_jax.training.budget import Budget
from grpo_jax.types import Metrics, TrainState, first_difference

if TYPE_CHECKING:
    import pandas


class Chunk(NamedTuple):
    """`n` successive iterations of a run, on the host; `R` rows (seeds × hyperparameters)."""

    metrics: dict[str, np.ndarray]  # each [n, R]; once a row's budget is spent, environment/steps is 0, others are NaN
    steps: np.ndarray  # int64 [n, R] environment steps since the start of the run
    iteration: int  # of the first of the n
    seconds: float  # since training started


class Progress(NamedTuple):
    """The progress of a run between two chunks: all that is needed to resume it, in this process or in another."""

    # [R, ...], with padding rows in multi-process runs. Donated to the next chunk: copy what you keep
    states: TrainState
    steps: np.ndarray  # int64 [R] environment steps made
    iteration: int  # iterations made, by the row with the most
    seconds: float  # of training
    evaluations: Evaluations
    stopped: np.ndarray  # bool [R]: the row makes no more iterations, whatever is left of its budget
    # `run` computes these from the others
    ended_by: np.ndarray  # str [R]: what ended the row, as in RunResult; "" while it goes on
    used: np.ndarray  # float64 [R] fraction of the budget

    @property
    def ended(self) -> np.ndarray:
        """`[R]` bool: the row makes no more iterations."""
        return self.ended_by != ""


Callback = Callable[[Progress, Chunk | None], Progress | None]
"""Called by `run` between two chunks; it may return a changed progress."""


def initial_progress(states: TrainState, num_rows: int) -> Progress:
    """The progress before the first iteration of `num_rows` rows."""
    zeros = np.zeros(num_rows)
    steps, stopped, ended_by = zeros.astype(np.int64), zeros.astype(bool), np.full(num_rows, "")
    return Progress(states, steps, 0, 0.0, no_evaluations(num_rows), stopped, ended_by, used=zeros)


def with_ends(progress: Progress, spent: Budget, fractions: Mapping[str, np.ndarray]) -> Progress:
    """The progress with `ended_by` and `used`, from `budget.spent` and `budget.fractions_done`, each `[R]` or more."""
    num_rows = len(progress.steps)
    used = functools.reduce(np.maximum, fractions.values())[:num_rows].astype(np.float64)
    ended_by = np.full(num_rows, "", "U16")
    for name, rows in spent._asdict().items():
        if rows is not None:
            first = rows[:num_rows] & (ended_by == "")
            ended_by[first] = name
            used[first] = fractions.get(name, used)[:num_rows][first]
    return progress._replace(ended_by=ended_by, used=used)


def describe_ends(ended_by: np.ndarray, used: np.ndarray, word: str = "seeds") -> str:
    """What ended rows, and how much of their budgets they used, such as "98.1% of total_steps used"."""
    texts = []
    for name in sorted(set(ended_by)):
        rows = ended_by == name
        percent = f"{100 * used[rows].mean():.1f}%"
        text = f"stopped at {percent} of the budget" if name == "stopped" else f"{percent} of {name} used"
        texts.append(text if rows.all() else f"{text} in {rows.sum()} of {len(rows)} {word}")
    return ", ".join(texts)


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
    settings: Settings | None = None  # which rows have the same hyperparameters and env_params; None: all

    @property
    def by_setting(self) -> dict[Setting, Block]:
        """The steps and metrics of each setting, whose columns are its seeds."""
        settings = self.settings or Settings({Setting(): np.arange(self.steps.shape[1])})
        return {
            setting: Block(self.steps[:, rows], {name: value[:, rows] for name, value in self.metrics.items()})
            for setting, rows in settings.rows.items()
        }

    def curves(self) -> dict[str, np.ndarray]:
        """Each metric, and the `environment_steps` made so far, as `[settings, seeds, iterations]`.

        Rows with the same hyperparameters and env_params are seeds of one setting. NaN where there is no value.
        """
        return stacked([*self.by_setting.values()])

    def to_dataframe(self) -> "pandas.DataFrame":
        """A table of pandas, with a line for each iteration of each row.

        Its columns are the hyperparameters and env_params in which rows differ, `seed`, `iteration`,
        `environment_steps` and the metrics. Raises ConfigError if pandas is not installed.
        """
        return as_dataframe(self.by_setting)


def to_host(metrics: Metrics, before: Progress, started: float) -> Chunk:
    """A chunk as NumPy arrays, without the iterations after the last row stopped."""
    num_rows = len(before.steps)
    made = np.asarray(metrics["environment/steps"])[:num_rows].T.astype(np.int64)
    num_made = np.flatnonzero(made.any(axis=1))[-1] + 1

    def known(metric):
        metric = np.asarray(metric)[:num_rows, :num_made].T
        return np.where(metric == missing(), np.float32(np.nan), metric) if metric.dtype.kind == "f" else metric

    steps, seconds = before.steps + np.cumsum(made[:num_made], axis=0), time.perf_counter() - started
    return Chunk({name: known(metric) for name, metric in metrics.items()}, steps, before.iteration, seconds)


def joined(parts: Sequence[Chunk | RunResult], num_rows: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The metrics and the steps of successive parts of a run; a metric is NaN in a part that lacks it."""
    parts = [part for part in parts if len(part.steps)]

    def values(name, part):
        return part.metrics.get(name, np.full(part.steps.shape, np.nan, np.float32))

    names = dict.fromkeys(name for part in parts for name in part.metrics)
    metrics = {name: np.concatenate([values(name, part) for part in parts]) for name in names}
    return metrics, np.concatenate([np.zeros((0, num_rows), np.int64), *(part.steps for part in parts)])


def without_padding(progress: Progress) -> Progress:
    """Without padding rows; several processes keep them, as removing them would need communication."""
    num_rows = len(progress.steps)
    if jax.process_count() > 1 or len(progress.states.iteration) == num_rows:
        return progress
    return progress._replace(states=_first_rows(progress.states, num_rows))


@functools.partial(jax.jit, static_argnums=1)
def _first_rows(states: TrainState, number: int) -> TrainState:
    return jax.tree.map(lambda leaf: leaf[:number], states)


def apply_callback(callback: Callback | None, progress: Progress, chunk: Chunk | None) -> Progress:
    """The progress after a call of the callback; `progress` itself if there is none, or if it changed nothing.

    Raises:
      ConfigError: the callback returned something else, or states of another structure, shapes or dtypes.
    """
    changed = None if callback is None else callback(progress, chunk)
    if changed is None or changed is progress:
        return progress
    if not isinstance(changed, Progress):
        raise ConfigError(
            f"the callback returned {type(changed).__name__}; return None, or what to go on from, such as "
            "progress._replace(states=...)"
        )
    if difference := first_difference(*(jax.eval_shape(lambda s: s, each.states) for each in (progress, changed))):
        path, before, after = difference
        raise ConfigError(
            f"the callback returned states in which {path} is {after} instead of {before}; keep structure, shapes and "
            "dtypes"
        )
    return changed._replace(stopped=_as_rows("the callback returned stopped =", changed.stopped, len(progress.steps)))


def _as_rows(what: str, value: np.ndarray | bool, num_rows: int) -> np.ndarray:
    """Which rows, bool `[num_rows]`; one bool is for all rows."""
    rows = np.asarray(value)
    if rows.dtype != bool or rows.shape not in ((), (num_rows,)):
        raise ConfigError(
            f"{what} {rows.dtype}{list(rows.shape)}, but it must be bool[{num_rows}], True for rows to stop"
        )
    return np.broadcast_to(rows, num_rows)


def with_evaluation(progress: Progress, returns: np.ndarray, stop_when: Callable | None) -> Progress:
    """The progress after an evaluation with `returns` `[R, 2]`, sampled and greedy; `stop_when`: see `Evaluate`."""
    evaluations = progress.evaluations.append(progress.iteration, progress.steps, *returns.T)
    stopped = progress.stopped
    if stop_when is not None:
        stopped = stopped | _as_rows("stop_when returned", stop_when(evaluations), len(progress.steps))
    return progress._replace(evaluations=evaluations, stopped=stopped)


def with_returns(chunk: Chunk, returns: np.ndarray | None) -> Chunk:
    """The chunk with the returns `[R, 2]` of an evaluation at its end among its metrics; None: there was none."""
    made = chunk.metrics["environment/steps"] > 0
    # A row that spends its budget within the chunk makes its last iteration before the chunk's end.
    last = made & (np.cumsum(made, axis=0) == made.sum(axis=0))
    columns = (np.nan, np.nan) if returns is None else returns.T
    columns = [np.where(last, column, np.nan) for column in columns]
    return chunk._replace(metrics=chunk.metrics | dict(zip((SAMPLED, GREEDY), columns, strict=True)))

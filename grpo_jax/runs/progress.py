"""The progress of a run, chunk by chunk."""

import functools
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np

from grpo_jax.errors import ConfigError
from grpo_jax.objectives.reductions import missing
from grpo_jax.runs.evaluations import GREEDY, SAMPLED, Evaluations, no_evaluations
from grpo_jax.training.budget import Budget
from grpo_jax.types import Metrics, PyTree, RewardParts, TrainState, first_difference


class Scored(NamedTuple):
    """What the host has scored of an iteration, each leaf `[R, B, ...]`."""

    states: PyTree  # of the environments, after their last steps
    params: PyTree  # of the environments
    outcome: RewardParts
    advantage: np.ndarray  # the mean over the steps of an environment, not finite where nothing is learnt from them


class Chunk(NamedTuple):
    """`n` successive iterations of a run, on the host; `R` rows (seeds × hyperparameters)."""

    metrics: dict[str, np.ndarray]  # each [n, R]; once a row's budget is spent, environment/steps is 0, others are NaN
    steps: np.ndarray  # int64 [n, R] environment steps since the start of the run
    iteration: int  # of the first of the n
    seconds: float  # since training started
    duration: float = 0.0  # seconds of the iterations, without callbacks
    scored: Scored | None = None  # of the one iteration, where the host scores it


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
        raise ConfigError(f"the callback returned {type(changed).__name__}; return None or progress._replace(...)")
    if difference := first_difference(*(jax.eval_shape(lambda s: s, each.states) for each in (progress, changed))):
        path, before, after = difference
        raise ConfigError(f"the callback changed {path} from {before} to {after}; keep structure, shapes and dtypes")
    return changed._replace(stopped=_as_rows("the callback returned stopped =", changed.stopped, len(progress.steps)))


def _as_rows(what: str, value: np.ndarray | bool, num_rows: int) -> np.ndarray:
    """Which rows, bool `[num_rows]`; one bool is for all rows."""
    rows = np.asarray(value)
    if rows.dtype != bool or rows.shape not in ((), (num_rows,)):
        raise ConfigError(f"{what} {rows.dtype}{list(rows.shape)}, but it must be bool[{num_rows}], True to stop rows")
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

"""Host: what a run writes (`metrics.jsonl`, one JSON object an iteration) and what it shows while it trains."""

import contextlib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from grpo_jax.recording.alarms import Alarms, listed
from grpo_jax.recording.files import METRICS_FILE, Record, claim_directory, cut_record
from grpo_jax.recording.trackers import Tracker


class MetricsChunk(Protocol):
    """A chunk of iterations on the host; `training.Chunk` is one."""

    @property
    def metrics(self) -> Mapping[str, np.ndarray]:
        """Each `[n, num_seeds]`; `environment/steps` is 0 in the rows of a seed whose budget is spent."""

    @property
    def steps(self) -> np.ndarray:
        """`[n, num_seeds]`, cumulative environment steps of each seed after each iteration."""

    @property
    def iteration(self) -> int:
        """Index of the first row."""

    @property
    def seconds(self) -> float:
        """Since the run started."""


class Logbook:
    """The record of one run over many seeds: JSON lines in a folder and one progress line on the console.

    ```python
    with Logbook(out, run="grpo CartPole-v1", total_steps=500_000, num_seeds=16) as logbook:
        for chunk in chunks:
            logbook.record(chunk)
    ```

    On a terminal the progress line is redrawn twice a second; elsewhere a plain line appears about every 10%. A summary
    line closes the run, also after an error, and says how many updates were skipped.

    Args:
      directory: where `metrics.jsonl` goes, made if missing; None writes nothing. Runs of one process may share it one
        after another; results that were there before are refused (`claim_directory`).
      run: the run's name, in every line.
      total_steps: environment steps that each seed is to make.
      num_seeds: length of the seeds axis.
      console: False shows nothing; True uses standard output; a rich `Console` is used as it is.
      past: what is recorded already of a run that goes on; all that the file says of it beyond that is removed.
      alarms: what to warn of.
      trackers: where the metrics go as well; they are closed with the logbook.

    Attributes:
      skipped_updates: int64 `[num_seeds]`, updates skipped so far for a non-finite loss or gradient.
      warnings: of the alarms, so far.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        run: str,
        total_steps: int,
        num_seeds: int,
        console: bool | Console = True,
        past: Record | None = None,
        alarms: Alarms | None = None,
        trackers: Sequence[Tracker] = (),
    ):
        if total_steps < 1 or num_seeds < 1:
            raise ValueError(f"total_steps and num_seeds must be at least 1, got {total_steps} and {num_seeds}.")
        self.skipped_updates = np.zeros(num_seeds, np.int64)
        self._directory = None if directory is None else Path(directory)
        self._run, self._total_steps, self._num_seeds = run, total_steps, num_seeds
        self._console = Console() if console is True else console or None
        self._file = self._progress = self._task = None
        self._steps = np.zeros(num_seeds, np.int64)
        self._returns = np.full(num_seeds, np.nan)
        self._seconds, self._tenths = 0.0, 0
        self._recent: deque[tuple[float, int]] = deque(maxlen=10)  # (seconds, steps of all seeds)
        self._past, self._alarms, self._trackers = past, alarms, trackers
        self.warnings: list[str] = []

    @property
    def typical_return(self) -> float:
        """Median over seeds of the last known return; NaN if there is none."""
        known = self._returns[~np.isnan(self._returns)]
        return float(np.median(known)) if len(known) else np.nan

    def __enter__(self) -> "Logbook":
        if self._directory is not None:
            claim_directory(self._directory, again=True)
            if self._past is not None:
                cut_record(self._directory, self._run, len(self._past.steps))
            self._file = (self._directory / METRICS_FILE).open("a", encoding="utf-8")
        if self._console is not None and self._console.is_interactive:
            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=20),
                TaskProgressColumn(),
                TextColumn("{task.fields[status]}", markup=False),
                console=self._console,
                refresh_per_second=2,
                transient=True,
            )
            total = self._total_steps * self._num_seeds
            self._task = self._progress.add_task(self._run, total=total, status="starting")
            self._progress.start()
        if self._past is not None and len(self._past.steps):
            self._follow(self._past, _active(self._past))
        return self

    def __exit__(self, exception_type, exception, traceback) -> None:
        with contextlib.ExitStack() as closing:  # all of them, whichever fails, the last one first
            if self._console is not None:
                closing.callback(self._print, self._summary(exception_type))
            for tracker in self._trackers:
                closing.callback(tracker.close)
            if self._file is not None:
                closing.callback(self._file.close)
            if self._progress is not None:
                closing.callback(self._progress.stop)

    def record(self, chunk: MetricsChunk) -> None:
        """Write a chunk's lines to the file, flush it, and bring the console up to date.

        NaN, infinities and the rows of seeds whose budget is spent become null. `environment_steps` is never null.

        Raises:
          ValueError: a metric or `steps` is not `[n, num_seeds]`. Nothing of the chunk is written.
        """
        steps = np.asarray(chunk.steps)
        metrics = {name: np.asarray(values) for name, values in chunk.metrics.items()}
        for name, values in {"steps": steps, **metrics}.items():
            shape = (len(steps), self._num_seeds)
            if values.shape != shape:
                raise ValueError(f"{name} must be [n, num_seeds] = {shape}, got {values.shape}.")
        if len(steps) == 0:
            return
        chunk = Record(metrics, steps, int(chunk.iteration), float(chunk.seconds))
        active = _active(chunk)
        if self._file is not None:
            self._write(chunk, active)
        known = self._follow(chunk, active)
        for tracker in self._trackers:
            tracker.record(chunk.iteration, steps, known)
        if self._console is not None:
            self._show()

    def _write(self, chunk: Record, active: np.ndarray) -> None:
        """Append one line an iteration."""
        columns = {"environment_steps": chunk.steps.tolist()}
        for name, values in chunk.metrics.items():
            columns[name] = np.where(active & np.isfinite(values), values.astype(object), None).tolist()
        for row in range(len(chunk.steps)):
            line = {"run": self._run, "iteration": chunk.iteration + row}
            line |= {name: column[row] for name, column in columns.items()}
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def _follow(self, chunk: Record, active: np.ndarray) -> dict[str, np.ndarray]:
        """Take from a chunk what the console and the summary show; returns the metrics, NaN in rows not active."""
        known = {name: np.where(active, values, np.nan) for name, values in chunk.metrics.items()}
        self._steps, self._seconds = chunk.steps[-1], chunk.seconds
        self._recent.append((self._seconds, int(self._steps.sum())))
        if "optim/skipped_updates" in known:
            self.skipped_updates += np.nansum(known["optim/skipped_updates"], axis=0).astype(np.int64)
        for returns in known.get("episode/return_mean", ()):
            self._returns = np.where(np.isfinite(returns), returns, self._returns)
        if self._alarms is not None:
            for warning in self._alarms.watch(chunk.iteration, known):
                self.warnings.append(warning)
                if self._console is not None:
                    self._print(f"warning: {self._run}: {warning}")
        return known

    def _show(self) -> None:
        """Redraw the progress line, or print a plain one at each tenth of the run."""
        done = int(np.minimum(self._steps, self._total_steps).sum())
        total = self._total_steps * self._num_seeds
        # The first chunk's time holds the compile, so the rate counts from its end as soon as there is a second one.
        (seconds, steps), (last_seconds, last_steps) = self._recent[0], self._recent[-1]
        if len(self._recent) == 1:
            seconds, steps = 0.0, 0
        rate = (last_steps - steps) / max(last_seconds - seconds, 1e-9)
        status = f"{rate:,.0f} steps/s, {_spread(self._returns)}, {_clock((total - done) / rate) if rate else '?'} left"
        if self._progress is not None:
            self._progress.update(self._task, completed=done, status=status)
        elif self._tenths < 10 * done // total < 10:
            self._tenths = 10 * done // total
            self._print(f"{self._run}: {100 * done // total}%, {status}")

    def _summary(self, exception_type: type[BaseException] | None) -> str:
        """The line that closes the run."""
        steps = int(self._steps.sum())
        rate = steps / self._seconds if self._seconds > 0 else 0.0
        text = f"{self._run}: {steps:,} environment steps in {_clock(self._seconds)} ({rate:,.0f} steps/s)"
        text += f", {_spread(self._returns)}"
        if exception_type is not None:
            text += f"; stopped early by {exception_type.__name__}"
        count = int(self.skipped_updates.sum())
        if count > 0:
            updates = "update" if count == 1 else "updates"
            seeds = listed(np.flatnonzero(self.skipped_updates))
            text += f"; {count} {updates} skipped: non-finite loss or gradient in seeds {seeds}"
        return text

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)


def _active(chunk: MetricsChunk) -> np.ndarray:
    """`[n, num_seeds]` bool: the seeds whose budget was not spent yet."""
    return chunk.metrics.get("environment/steps", np.ones(chunk.steps.shape)) > 0


def _spread(returns: np.ndarray) -> str:
    """The last known returns of all seeds in a few words."""
    known = returns[~np.isnan(returns)]
    if len(known) == 0:
        return "no return yet"
    low, middle, high = (f"{x:,.0f}" if abs(x) >= 1e4 else f"{x:.4g}" for x in np.quantile(known, [0, 0.5, 1]))
    return f"return {middle}" if len(returns) == 1 else f"return {middle} ({low}..{high})"


def _clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

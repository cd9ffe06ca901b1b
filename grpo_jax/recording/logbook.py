"""Host: the metrics of a run in `metrics.jsonl`, one JSON object an iteration, and its progress on the console."""

import contextlib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Column

from grpo_jax.recording.alarms import Alarms, list_seeds
from grpo_jax.recording.claims import claim_directory
from grpo_jax.recording.files import METRICS_FILE, truncate_metrics
from grpo_jax.recording.json_fields import plain
from grpo_jax.recording.rows import Settings, settings_of
from grpo_jax.recording.trackers import Tracker
from grpo_jax.training.evaluations import GREEDY, SAMPLED
from grpo_jax.training.progress import Chunk


class Logbook:
    """Writes the metrics of one run, of all its seeds, to a folder, and shows its progress in one line of the console.

    ```python
    with Logbook(out, run="grpo CartPole-v1", total_steps=500_000, num_seeds=16) as logbook:
        for chunk in chunks:
            logbook.record(chunk)
    ```

    On a terminal the progress line is redrawn twice a second; elsewhere a plain line is printed about every 10%. The
    last line, which is printed after an error as well, says how many updates were skipped.

    Args:
      directory: the folder of `metrics.jsonl`, created if it does not exist; None writes nothing. Runs of one process
        may share a folder, one after another; one with other results is refused (`claim_directory`).
      run: the run's name, in every line.
      total_steps: environment steps that each seed makes, of which `record` takes the share that is done by default.
      num_seeds: length of the seeds axis.
      console: False shows nothing; True uses standard output; a rich `Console` is used as it is.
      past: the iterations recorded before a resumed run goes on; later ones are removed from the file.
      alarms: print warnings of what goes wrong.
      trackers: receive the metrics as well; they are closed with the logbook.
      settings: of the rows, where these are not all seeds of one.

    Attributes:
      skipped_updates: int64 `[num_seeds]`, updates skipped so far because of a non-finite loss or gradient.
      warnings: those of the alarms so far.
      ending: why the run ended, for its last line.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        run: str,
        total_steps: int,
        num_seeds: int,
        console: bool | Console = True,
        past: Chunk | None = None,
        alarms: Alarms | None = None,
        trackers: Sequence[Tracker] = (),
        settings: Settings | None = None,
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
        self._iteration = 0
        self._seconds, self._tenths = 0.0, 0
        self._recent: deque[tuple[float, int, float]] = deque(maxlen=10)  # (seconds, steps of all seeds, share done)
        self._last_line = 0  # its length
        self._past, self._alarms, self._trackers = past, alarms, trackers
        self._settings = settings_of({}, num_seeds) if settings is None else settings
        self.warnings: list[str] = []
        self.ending = ""

    @property
    def typical_return(self) -> float:
        """Median over seeds of the last known return, of an evaluation if there are any; NaN if there is none.

        With several settings, of the seeds of the best one.
        """
        returns = self._returns[self._settings.rows[self._settings.ranked(self._returns)[0]]]
        known = returns[~np.isnan(returns)]
        return float(np.median(known)) if len(known) else np.nan

    def __enter__(self) -> "Logbook":
        if self._directory is not None:
            claim_directory(self._directory, again=True)
            if self._past is not None:
                truncate_metrics(self._directory, self._run, len(self._past.steps))
            self._file = (self._directory / METRICS_FILE).open("a", encoding="utf-8")
        if self._console is not None and self._console.is_interactive:
            self._progress = Progress(
                TextColumn("{task.description}", markup=False, table_column=Column(max_width=28, no_wrap=True)),
                BarColumn(bar_width=20),
                TaskProgressColumn(),
                TextColumn("{task.fields[status]}", markup=False),
                console=self._console,
                refresh_per_second=2,
                transient=True,
            )
            self._task = self._progress.add_task(self._run, total=1.0, status="compiling")
            self._progress.start()
        if self._past is not None and len(self._past.steps):
            self._update(self._past, _active(self._past))
        return self

    def __exit__(self, exception_type, exception, traceback) -> None:
        with contextlib.ExitStack() as closing:  # everything is closed, even if one fails, in the reverse order
            if self._console is not None:
                closing.callback(self._print, self._summary(exception_type))
            for tracker in self._trackers:
                closing.callback(tracker.close)
            if self._file is not None:
                closing.callback(self._file.close)
            if self._progress is not None:
                closing.callback(self._progress.stop)

    def record(self, chunk: Chunk, done: np.ndarray | None = None) -> None:
        """Writes a chunk's lines to the file, flushes it, and updates the console.

        NaN, infinities and the rows of seeds whose budget is spent become null. `environment_steps` is never null.

        Args:
          chunk: the next iterations.
          done: `[num_seeds]` share of training that each seed has done by its end; by default of `total_steps`.

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
        chunk = Chunk(metrics, steps, int(chunk.iteration), float(chunk.seconds))
        active = _active(chunk)
        if self._file is not None:
            self._write(chunk, active)
        known = self._update(chunk, active)
        done = np.minimum(steps[-1] / self._total_steps if done is None else done, 1.0)
        self._iteration = chunk.iteration + len(steps)
        self._recent.append((self._seconds, int(self._steps.sum()), float(np.mean(done))))
        for tracker in self._trackers:
            tracker.record(chunk.iteration, steps, known)
        if self._console is not None:
            self._show()

    def complete(self, metrics: Mapping[str, np.ndarray]) -> None:
        """Writes the last recorded iteration again, with the returns of an evaluation that came after it.

        Args:
          metrics: each `[n, num_seeds]`, of iterations up to that one.
        """
        if not self._iteration:
            return
        last = Chunk({name: values[-1:] for name, values in metrics.items()}, self._steps[None], self._iteration - 1, 0)
        if self._file is not None:
            self._file.truncate(self._file.tell() - self._last_line)
            self._write(last, _active(last))
        self._returns = np.where(np.isfinite(last.metrics[SAMPLED][0]), last.metrics[SAMPLED][0], self._returns)
        for tracker in self._trackers:
            tracker.record(last.iteration, last.steps, {name: last.metrics[name] for name in (SAMPLED, GREEDY)})

    def _write(self, chunk: Chunk, active: np.ndarray) -> None:
        """Appends one line an iteration."""
        columns = {"environment_steps": chunk.steps.tolist()}
        settings = {name: [_setting(value) for value in row] for name, row in self._settings.values.items()}
        for name, values in chunk.metrics.items():
            columns[name] = np.where(active & np.isfinite(values), values.astype(object), None).tolist()
        for row in range(len(chunk.steps)):
            line = {"run": self._run, "iteration": chunk.iteration + row}
            line |= {name: column[row] for name, column in columns.items()} | settings
            self._last_line = self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def _update(self, chunk: Chunk, active: np.ndarray) -> dict[str, np.ndarray]:
        """Updates what the console and the summary show; returns the metrics, NaN in rows that are not active."""
        known = {name: np.where(active, values, np.nan) for name, values in chunk.metrics.items()}
        self._steps, self._seconds = chunk.steps[-1], chunk.seconds
        if "optim/skipped_updates" in known:
            self.skipped_updates += np.nansum(known["optim/skipped_updates"], axis=0).astype(np.int64)
        for returns in known.get(SAMPLED, known.get("episode/return_mean", ())):
            self._returns = np.where(np.isfinite(returns), returns, self._returns)
        if self._alarms is not None:
            for warning in self._alarms.watch(chunk.iteration, known):
                self.warnings.append(warning)
                if self._console is not None:
                    self._print(f"warning: {self._run}: {warning}")
        return known

    def _show(self) -> None:
        """Redraws the progress line, or prints a plain one at each tenth of the run."""
        # The first chunk's time holds the compile, so rates count from its end as soon as there is a second one.
        first, (seconds, steps, done) = self._recent[0], self._recent[-1]
        if len(self._recent) == 1:
            first = 0.0, 0, 0.0
        passed = max(seconds - first[0], 1e-9)
        left = f"{_clock((1 - done) * passed / (done - first[2])) if done > first[2] else '?'} left"
        rate = (steps - first[1]) / passed
        spread = _spread(self._returns, self._settings)
        status = f"iteration {self._iteration}, {spread}, {left}, {rate:,.0f} steps/s"
        tenths = int(10 * done + 1e-4)  # shares are float32
        if self._progress is not None:  # a narrow terminal cuts off the end of the status
            self._progress.update(self._task, completed=done, status=status)
        elif self._tenths < tenths < 10:
            self._tenths = tenths
            self._print(f"{self._run}: {int(100 * done + 1e-3)}%, {status}")

    def _summary(self, exception_type: type[BaseException] | None) -> str:
        """The last line of the run."""
        steps = int(self._steps.sum())
        rate = steps / self._seconds if self._seconds > 0 else 0.0
        text = f"{self._run}: {steps:,} environment steps in {_clock(self._seconds)} ({rate:,.0f} steps/s)"
        text += f", {_spread(self._returns, self._settings)}"
        if self.ending:
            text += f"; {self.ending}"
        if exception_type is not None:
            text += f"; stopped early by {exception_type.__name__}"
        count = int(self.skipped_updates.sum())
        if count > 0:
            updates = "update" if count == 1 else "updates"
            rows = list_seeds(np.flatnonzero(self.skipped_updates))
            text += f"; {count} {updates} skipped: non-finite loss or gradient in {self._settings.word} {rows}"
        return text

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)


def _active(chunk: Chunk) -> np.ndarray:
    """`[n, num_seeds]` bool: the seeds whose budget was not spent yet."""
    return chunk.metrics.get("environment/steps", np.ones(chunk.steps.shape)) > 0


def _setting(value: np.generic) -> Any:
    """In JSON, with no more digits than float32 has."""
    return plain(float(str(value)), not_finite=str) if isinstance(value, np.floating) else value.item()


def _spread(returns: np.ndarray, settings: Settings) -> str:
    """The median of the last known returns of all seeds, and their range; of several settings, of the best one."""
    best = settings.ranked(returns)[0]
    returns = returns[settings.rows[best]]
    known = returns[~np.isnan(returns)]
    if len(known) == 0:
        return "no return yet"
    low, middle, high = (f"{x:,.0f}" if abs(x) >= 1e4 else f"{x:.4g}" for x in np.quantile(known, [0, 0.5, 1]))
    text = f"return {middle}" if len(returns) == 1 else f"return {middle} ({low}..{high})"
    return text if len(settings.rows) == 1 else f"{text} of {best}, the best of {len(settings.rows)} settings"


def _clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

"""Host: the metrics of a run in `metrics.jsonl` and trackers, and its progress on the console."""

import contextlib
import datetime
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Column

from grpo_jax.recording.metrics_file import METRICS_FILE, as_lines, truncate_metrics
from grpo_jax.recording.run_folder import StopSignal
from grpo_jax.recording.trackers import Tracker
from grpo_jax.recording.training_warnings import TrainingWarnings
from grpo_jax.runs.evaluations import SAMPLED
from grpo_jax.runs.progress import Chunk
from grpo_jax.runs.run_spec import RunSpec, list_first
from grpo_jax.training.budget import most_steps

LONGEST_SILENCE = 10.0
"""Seconds between two lines, at most, where there is no terminal."""
SIGNALS = {
    "group/zero_variance_fraction": "groups with a difference: {1:.0f} of {2}, ",
    "group/score_std_mean": "std {0:.2g}, ",
    "episode/cut_fraction": "{0:.0%} cut, ",
    "policy/kl_reference": "KL {0:.2g}, ",
}
"""What is shown of an iteration of a language model, by its metric: from the mean, groups that differ, and groups."""


class MetricsLogger:
    """Writes the metrics of a run to a folder, and shows its progress in one line of the console.

    On a terminal the progress line is redrawn twice a second; elsewhere a plain line is printed at the start and every
    ten seconds, where a chunk ends; of a language model for each chunk. The last line, which is printed after an error
    as well, says how many updates were skipped.

    Args:
      directory: the folder of `metrics.jsonl`, which runs may share, one after another; None writes nothing.
      spec: the run.
      console: False shows nothing; True uses standard output; a rich `Console` is used as it is.
      past: the iterations recorded before a resumed run goes on; later ones are removed from the file.
      trackers: receive the metrics as well; one that fails is left out from then on.

    Attributes:
      skipped_updates: int64 `[R]`, updates skipped so far because of a non-finite loss or gradient.
      warnings: of what goes wrong in training, so far.
      ending: why the run ended, for its last line.
    """

    def __init__(
        self,
        directory: Path | None,
        spec: RunSpec,
        *,
        console: bool | Console = True,
        past: Chunk | None = None,
        trackers: Sequence[Tracker] = (),
    ):
        self._directory, self._setting, self._settings = directory, spec.setting, spec.settings
        self._run = spec.setting.title
        self._word = spec.config.env.step_word
        self._reward_word, steps = spec.config.env.words
        self._rate_word, self._shows_each = f"{steps}/s", steps != "steps"
        self._num_groups, self._signals = spec.config.num_groups, ""
        self._total_steps = most_steps(spec.config, spec.hyperparams)
        self._console = Console(quiet=not console) if isinstance(console, bool) else console
        self._file = self._progress = self._task = None
        self._steps = np.zeros(len(spec.keys), np.int64)
        self._returns, self._evaluated = np.full((2, len(spec.keys)), np.nan)
        self._iteration, self._seconds = 0, 0.0
        # Seconds, steps of all rows and the share done at the end of the first chunk, in whose time is the compilation.
        self._began: tuple[float, int, float] | None = None
        self._printed_at = time.monotonic()
        self._past, self._trackers = past, [*trackers]
        self._watch = TrainingWarnings(spec.config.env.action_space, self._settings.word)
        self.skipped_updates = np.zeros(len(spec.keys), np.int64)
        self.warnings: list[str] = []
        self.ending = ""

    def __enter__(self) -> "MetricsLogger":
        if self._directory is not None:
            if self._past is not None:
                truncate_metrics(self._directory, self._setting, len(self._past.steps))
            self._file = (self._directory / METRICS_FILE).open("a", encoding="utf-8")
        if self._console.is_interactive and not self._console.quiet:
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
        else:
            self.say("compiling; what is compiled for the first time takes up to a minute")
        if self._past is not None and len(self._past.steps):
            self._update(self._past, _active(self._past))
        return self

    def __exit__(self, exception_type, exception, traceback) -> None:
        with contextlib.ExitStack() as closing:  # everything is closed, even if one fails, in the reverse order
            closing.callback(self.say, self._summary(exception_type))
            closing.callback(self._track, "close")
            if self._file is not None:
                closing.callback(self._file.close)
            if self._progress is not None:
                closing.callback(self._progress.stop)

    def record(self, chunk: Chunk, done: np.ndarray | None = None) -> None:
        """Writes a chunk's lines to the file, flushes it, and updates the console.

        NaN, infinities and the rows whose budget is spent become null. `environment_steps` is never null.

        Args:
          chunk: the next iterations.
          done: `[R]` share of training that each row has done by its end; by default of the budget of steps.
        """
        steps = chunk.steps
        if len(steps) == 0:
            return
        active = _active(chunk)
        if self._file is not None:
            self._file.writelines(as_lines(self._setting, chunk, active, self._settings))
            self._file.flush()
        known = self._update(chunk, active)
        done = np.minimum(steps[-1] / self._total_steps if done is None else done, 1.0)
        self._iteration = chunk.iteration + len(steps)
        self._track("record", chunk.iteration, steps, known)
        self._show(float(np.mean(done)))

    def warn(self, *warnings: str) -> None:
        """Prints warnings, and keeps them."""
        for warning in warnings:
            self.warnings.append(warning)
            self.say(warning, "warning: ")

    def _track(self, method: str, *arguments: Any) -> None:
        """Calls a method of each tracker."""
        for tracker in [*self._trackers]:
            try:
                getattr(tracker, method)(*arguments)
            except Exception as error:
                self._trackers.remove(tracker)
                self.warn(f"{type(tracker).__name__} failed ({error}); the run goes on without it.")

    def _update(self, chunk: Chunk, active: np.ndarray) -> dict[str, np.ndarray]:
        """Updates what the console and the summary show; returns the metrics, NaN in rows that are not active."""
        known = {name: np.where(active, values, np.nan) for name, values in chunk.metrics.items()}
        self._steps, self._seconds = chunk.steps[-1], chunk.seconds
        if "optim/skipped_updates" in known:
            self.skipped_updates += np.nansum(known["optim/skipped_updates"], axis=0).astype(np.int64)
        for returns in known.get("episode/return_mean", ()):
            self._returns = np.where(np.isfinite(returns), returns, self._returns)
        for returns in known.get(SAMPLED, ()):
            self._evaluated = np.where(np.isfinite(returns), returns, self._evaluated)
        if self._shows_each:
            took = f"{chunk.duration / len(chunk.steps):.2f} s an iteration, "
            self._signals = _describe_signals(known, self._num_groups) + took
        self.warn(*self._watch(chunk.iteration, known))
        return known

    def _show(self, done: float) -> None:
        """Redraws the progress line, or prints a plain one; `done` is the share of the run."""
        steps = int(self._steps.sum())
        started, before, share = self._began or (0.0, 0, 0.0)
        self._began = self._began or (self._seconds, steps, done)
        passed = max(self._seconds - started, 1e-9)
        left = _clock((1 - done) * passed / (done - share)) if done > share else "?"
        status = f"iteration {self._iteration}, {self._spread()}, {self._signals}{left} left, "
        status += f"{(steps - before) / passed:,.0f} {self._rate_word}"
        if self._progress is not None:  # a narrow terminal cuts off the end of the status
            self._progress.update(self._task, completed=done, status=status)
        elif self._shows_each or time.monotonic() - self._printed_at >= LONGEST_SILENCE:
            self.say(f"{int(100 * done + 1e-3)}%, {status}")  # shares are float32

    def _summary(self, exception_type: type[BaseException] | None) -> str:
        """The last line of the run."""
        steps = int(self._steps.sum())
        rate = steps / self._seconds if self._seconds > 0 else 0.0
        text = f"{steps:,} {self._word} in {_clock(self._seconds)} ({rate:,.0f} {self._rate_word})"
        text += f", {self._spread()}" + (f"; {self.ending}" if self.ending else "")
        if exception_type is not None:
            cause = "a signal" if issubclass(exception_type, StopSignal) else exception_type.__name__
            text += f"; stopped early by {cause}"
        if (count := self.skipped_updates.sum()) > 0:
            updates = "update" if count == 1 else "updates"
            rows = list_first(np.flatnonzero(self.skipped_updates))
            text += f"; {count} {updates} skipped: non-finite loss or gradient in {self._settings.word} {rows}"
        return text

    def _spread(self) -> str:
        """The median of the last known returns, and their range; of several settings, of the best one."""
        best, num_settings = self._settings.ranked(self._returns)[0], len(self._settings.rows)
        returns, evaluated = (_range(each[self._settings.rows[best]]) for each in (self._returns, self._evaluated))
        text = f"{self._reward_word} {returns}" if returns else f"no {self._reward_word} yet"
        text += f", evaluated {evaluated}" if evaluated else ""
        return text if num_settings == 1 else f"{text} of {best}, the best of {num_settings} settings"

    def say(self, text: str, kind: str = "") -> None:
        """Prints a line about the run."""
        self._printed_at = time.monotonic()
        self._console.print(f"{kind}{self._run}: {text}", markup=False, emoji=False, highlight=False, soft_wrap=True)


def _describe_signals(metrics: Mapping[str, np.ndarray], num_groups: int) -> str:
    """The signals of the last iteration of metrics `[n, R]`, means over rows that have not ended."""
    last = {name: metrics[name][-1] for name in SIGNALS if name in metrics}
    means = {name: np.nanmean(values) for name, values in last.items() if not np.isnan(values).all()}
    return "".join(SIGNALS[name].format(mean, (1 - mean) * num_groups, num_groups) for name, mean in means.items())


def _active(chunk: Chunk) -> np.ndarray:
    """`[n, R]` bool: the rows whose budget was not spent yet."""
    return chunk.metrics.get("environment/steps", np.ones(chunk.steps.shape)) > 0


def _range(returns: np.ndarray) -> str:
    """Such as "200 (150..210)", of several rows; empty if none is known."""
    if np.isnan(returns).all():
        return ""
    low, middle, high = (f"{x:,.0f}" if abs(x) >= 1e4 else f"{x:.4g}" for x in np.nanquantile(returns, [0, 0.5, 1]))
    return f"{middle} ({low}..{high})" if len(returns) > 1 else middle


def _clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    return str(datetime.timedelta(seconds=round(seconds)))

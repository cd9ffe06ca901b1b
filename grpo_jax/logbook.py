"""Host: what a run writes (`metrics.jsonl`, one JSON object an iteration) and what it shows while it trains."""

import json
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"

# Folders that this process made its own: the runs of one experiment follow each other in one file.
_claimed: set[Path] = set()


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

    Attributes:
      skipped_updates: int64 `[num_seeds]`, updates skipped so far for a non-finite loss or gradient.
    """

    def __init__(
        self, directory: Path | None, *, run: str, total_steps: int, num_seeds: int, console: bool | Console = True
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

    def __enter__(self) -> "Logbook":
        if self._directory is not None:
            if self._directory.resolve() not in _claimed:
                claim_directory(self._directory)
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
        return self

    def __exit__(self, exception_type, exception, traceback) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self._file is not None:
            self._file.close()
        if self._console is not None:
            self._print(self._summary(exception_type))

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
        active = metrics.get("environment/steps", np.ones(steps.shape)) > 0
        if self._file is not None:
            self._write(chunk.iteration, steps, metrics, active)
        self._follow(steps, metrics, active, chunk.seconds)
        if self._console is not None:
            self._show()

    def _write(self, iteration: int, steps: np.ndarray, metrics: dict[str, np.ndarray], active: np.ndarray) -> None:
        """Append one line an iteration."""
        columns = {"environment_steps": steps.tolist()}
        for name, values in metrics.items():
            columns[name] = np.where(active & np.isfinite(values), values.astype(object), None).tolist()
        for row in range(len(steps)):
            line = {"run": self._run, "iteration": int(iteration) + row}
            line |= {name: column[row] for name, column in columns.items()}
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def _follow(self, steps: np.ndarray, metrics: dict[str, np.ndarray], active: np.ndarray, seconds: float) -> None:
        """Take from a chunk what the console and the summary show."""
        self._steps, self._seconds = steps[-1], float(seconds)
        self._recent.append((self._seconds, int(self._steps.sum())))
        if "optim/skipped_updates" in metrics:
            skipped = metrics["optim/skipped_updates"].astype(np.float64)
            self.skipped_updates += np.nansum(np.where(active, skipped, 0), axis=0).astype(np.int64)
        if "episode/return_mean" in metrics:
            returns = metrics["episode/return_mean"]
            for row, known in zip(returns, active & np.isfinite(returns), strict=True):
                self._returns[known] = row[known]

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
            seeds = np.flatnonzero(self.skipped_updates).tolist()
            shown = ", ".join(map(str, seeds[:10])) + (f", and {len(seeds) - 10} more" if len(seeds) > 10 else "")
            updates = "update" if count == 1 else "updates"
            text += f"; {count} {updates} skipped: non-finite loss or gradient in seeds [{shown}]"
        return text

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def claim_directory(path: Path) -> Path:
    """Make `path` the folder of this process's results, or refuse it.

    Creates the folder and an empty `metrics.jsonl` in it. Of two processes that claim one folder at the same moment,
    one succeeds. An experiment calls this once, before it compiles; its Logbooks then write there one after another.

    Raises:
      FileExistsError: the folder holds a run's results already, or `path` is a file. Nothing was written.
    """
    path = Path(path)
    advice = "Nothing was written. Choose another folder (--out), or move the old one away."
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is a file, so it cannot be the folder of a run. {advice}")
    path.mkdir(parents=True, exist_ok=True)
    if (path / SUMMARY_FILE).exists():
        raise FileExistsError(f"{path} already holds a run ({SUMMARY_FILE}). {advice}")
    try:
        (path / METRICS_FILE).open("x").close()
    except FileExistsError:
        raise FileExistsError(f"{path} already holds a run ({METRICS_FILE}). {advice}") from None
    _claimed.add(path.resolve())
    return path


def write_json(path: Path, value: Any) -> None:
    """Write `value` as strict JSON, atomically: a reader finds the old file or the new one, never a part.

    Arrays become lists, NaN and infinities null, paths strings.

    Raises:
      TypeError: a value that JSON has no form for. The old file stays as it was.
    """
    path = Path(path)
    text = json.dumps(_plain(value), indent=2, allow_nan=False) + "\n"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    """`value` in JSON's own types."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "__array__"):
        return _plain(np.asarray(value).tolist())
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


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

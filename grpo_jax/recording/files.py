"""Host: the files of a run's results: `metrics.jsonl`, and files that are replaced as a whole."""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.recording.json_fields import as_numbers, plain
from grpo_jax.recording.rows import PREFIXES, Settings, settings_of
from grpo_jax.training.progress import Chunk

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"


def folder_name(name: str) -> str:
    """The name with `_` for characters that a folder's name may not have."""
    return re.sub(r"[^\w.()-]+", "_", name)


def read_metrics(directory: Path) -> dict[str, Chunk]:
    """The iterations of each run in `metrics.jsonl`, by the run's name, with `seconds` 0.

    Metrics are `[n, num_seeds]`, float32, with NaN for null; `environment/steps` are int32, with 0 for null.
    """
    runs: dict[str, list[dict[str, Any]]] = {}
    for line in read_lines(directory):
        lines = runs.setdefault(line["run"], [])
        if line["iteration"] == len(lines):
            lines.append(line)
    return {run: _as_chunk(lines) for run, lines in runs.items() if lines}


def read_settings(directory: Path) -> dict[str, Settings]:
    """The settings of the rows of each run in `metrics.jsonl`, by the run's name."""
    found = {}
    for run, line in {line["run"]: line for line in read_lines(directory)}.items():
        columns = {name: as_numbers(values) for name, values in line.items() if name.startswith(PREFIXES)}
        found[run] = settings_of(columns, len(line["environment_steps"]))
    return found


def _as_chunk(lines: list[dict[str, Any]]) -> Chunk:
    last = {name: value for line in lines for name, value in line.items()}
    others = "run", "iteration", "environment_steps"
    names = [name for name in last if name not in others and not name.startswith(PREFIXES)]
    empty = [None] * len(lines[0]["environment_steps"])  # a resumed run may have evaluations that it had not before
    metrics = {name: np.array([line.get(name, empty) for line in lines], np.float32) for name in names}
    if "environment/steps" in metrics:
        made = np.array([line["environment/steps"] for line in lines], np.float64)  # exact beyond float32's 2^24
        metrics["environment/steps"] = np.nan_to_num(made).astype(np.int32)
    return Chunk(metrics, np.array([line["environment_steps"] for line in lines], np.int64), iteration=0, seconds=0.0)


def read_lines(directory: Path) -> Iterator[dict[str, Any]]:
    """The lines of `metrics.jsonl`, of all runs; one that was not written to its end is left out."""
    path = Path(directory) / METRICS_FILE
    if path.exists():
        with path.open(encoding="utf-8") as file:
            for line in file:
                with contextlib.suppress(json.JSONDecodeError):  # its writer was killed
                    yield json.loads(line)


def truncate_metrics(directory: Path, run: str, num_iterations: int) -> None:
    """Removes the lines of a run in `metrics.jsonl` beyond its first `num_iterations` iterations."""
    kept = [line for line in read_lines(directory) if line["run"] != run or line["iteration"] < num_iterations]
    _replace(directory / METRICS_FILE, "".join(json.dumps(line) + "\n" for line in kept))


def write_json(path: Path, value: Any) -> None:
    """Writes strict JSON atomically: a reader finds the old file or the new one, never a part.

    Arrays become lists, dataclasses objects, NaN and infinities null, paths strings.

    Raises:
      TypeError: `value` contains something that JSON cannot express. The old file stays as it was.
    """
    _replace(Path(path), json.dumps(plain(value), indent=2, allow_nan=False) + "\n")


def _replace(path: Path, text: str) -> None:
    with replacement(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replacement(path: Path) -> Iterator[Path]:
    """A temporary path for the block to write to; the file then takes the place of `path`, if the block succeeds.

    The folder of the file is made if it does not exist.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def new_files(folder: Path) -> Iterator[Path]:
    """A temporary folder for the block to write to; its files then become those of `folder`, if the block succeeds.

    Without success, such as on a full disk, nothing is left, and files that `folder` had stay as they were.
    """
    is_new = not folder.exists()
    # In an existing folder, as its parent may be on another file system.
    temporary = (folder.parent if is_new else folder) / f".{folder.name}.{os.getpid()}.tmp"
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in temporary.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if is_new:
            os.replace(temporary, folder)
        else:
            for path in temporary.iterdir():
                os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)

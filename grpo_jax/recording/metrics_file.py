"""Host: `metrics.jsonl`, a JSON object an iteration, in which the settings of a run's rows stand as well."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.recording.files import as_numbers, fits, json_lines, plain, write_text
from grpo_jax.runs.progress import Chunk
from grpo_jax.runs.settings import PREFIXES, Settings, settings_of

METRICS_FILE = "metrics.jsonl"


def read_metrics(directory: Path) -> dict[str, Chunk]:
    """The iterations of each run in `metrics.jsonl`, by the run's name, with `seconds` 0.

    Metrics are `[n, R]`, float32, with NaN for null; `environment/steps` are int32, with 0 for null.
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
        # Exact beyond float32's 2^24.
        made = np.array([line.get("environment/steps", empty) for line in lines], np.float64)
        metrics["environment/steps"] = np.nan_to_num(made).astype(np.int32)
    return Chunk(metrics, np.array([line["environment_steps"] for line in lines], np.int64), iteration=0, seconds=0.0)


def read_lines(directory: Path) -> Iterator[dict[str, Any]]:
    """The lines of `metrics.jsonl`, of all runs, without those that were cut off or damaged."""
    num_rows: dict[str, int] = {}
    for line in json_lines(Path(directory) / METRICS_FILE):
        if _is_line(line):
            number = len(line["environment_steps"])
            if num_rows.setdefault(line["run"], number) == number:
                yield line


def _is_line(line: Mapping[str, Any]) -> bool:
    """Whether this is what `as_lines` writes: columns of the right types, all of one length."""
    steps = line.get("environment_steps")
    if type(line.get("run")) is not str or type(line.get("iteration")) is not int or not fits(steps, list[int]):
        return False
    for name in line.keys() - {"run", "iteration"}:
        kind = float | bool | (str if name.startswith(PREFIXES) else None)
        values = line[name]
        if not fits(values, list[kind]) or len(values) != len(steps):
            return False
        if any(type(value) is int and abs(value) >= 2**63 for value in values):
            return False
    return True


def as_lines(run: str, chunk: Chunk, active: np.ndarray, settings: Settings) -> Iterator[str]:
    """A line for each iteration of a chunk: null for NaN, infinity, and rows that are not active, `[n, R]`."""
    columns = {"environment_steps": chunk.steps.tolist()}
    for name, values in chunk.metrics.items():
        columns[name] = np.where(active & np.isfinite(values), values.astype(object), None).tolist()
    # No more digits than float32 has.
    rows = {
        name: [plain(float(str(value)) if value.dtype.kind == "f" else value.item()) for value in values]
        for name, values in settings.values.items()
    }
    for i in range(len(chunk.steps)):
        line = {"run": run, "iteration": chunk.iteration + i} | {name: column[i] for name, column in columns.items()}
        yield json.dumps(line | rows, allow_nan=False) + "\n"


def truncate_metrics(directory: Path, run: str, num_iterations: int) -> None:
    """Removes the lines of a run in `metrics.jsonl` beyond its first `num_iterations` iterations."""
    kept = [line for line in read_lines(directory) if line["run"] != run or line["iteration"] < num_iterations]
    write_text(directory / METRICS_FILE, "".join(json.dumps(line) + "\n" for line in kept))

"""Host: `metrics.jsonl`, a JSON object for each iteration, which also has the settings of the rows."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.recording.files import as_numbers, json_lines, plain, write_text
from grpo_jax.runs.progress import Chunk
from grpo_jax.runs.run_spec import Setting, Settings, Value, grouped

METRICS_FILE = "metrics.jsonl"
PREFIX = "setting/"
"""Begins the keys of a line that hold the settings of the rows."""
VALUES = dict[str, Value | bool]
"""The type of a setting's values in JSON."""


def read_metrics(directory: Path) -> dict[Setting, Chunk]:
    """The iterations of each run in `metrics.jsonl`, with `seconds` 0.

    Metrics are `[n, R]`, float32, with NaN for null; `environment/steps` are int32, with 0 for null.
    """
    runs: dict[Setting, list[dict[str, Any]]] = {}
    for line in read_lines(directory):
        lines = runs.setdefault(line["run"], [])
        if line["iteration"] == len(lines):
            lines.append(line)
    return {run: _as_chunk(lines) for run, lines in runs.items() if lines}


def read_settings(directory: Path) -> dict[Setting, Settings]:
    """The settings of the rows of each run in `metrics.jsonl`."""
    found = {}
    for run, line in {line["run"]: line for line in read_lines(directory)}.items():
        columns = {key.removeprefix(PREFIX): line[key] for key in line if key.startswith(PREFIX)}
        rows = range(len(line["environment_steps"]))
        values = ({name: as_numbers(column[row]) for name, column in columns.items()} for row in rows)
        found[run] = grouped(map(Setting, values))
    return found


def _as_chunk(lines: list[dict[str, Any]]) -> Chunk:
    last = {name: value for line in lines for name, value in line.items()}
    others = "run", "iteration", "environment_steps"
    names = [name for name in last if name not in others and not name.startswith(PREFIX)]
    empty = [None] * len(lines[0]["environment_steps"])  # a resumed run may have evaluations that it had not before
    metrics = {name: np.array([line.get(name, empty) for line in lines], np.float32) for name in names}
    if "environment/steps" in metrics:
        # Exact beyond float32's 2^24.
        made = np.array([line.get("environment/steps", empty) for line in lines], np.float64)
        metrics["environment/steps"] = np.nan_to_num(made).astype(np.int32)
    return Chunk(metrics, np.array([line["environment_steps"] for line in lines], np.int64), iteration=0, seconds=0.0)


def read_lines(directory: Path) -> Iterator[dict[str, Any]]:
    """The lines of `metrics.jsonl`, of all runs, without those cut off or of other formats; `run` is a `Setting`."""
    for line in json_lines(Path(directory) / METRICS_FILE):
        if isinstance(line.get("run"), Mapping):
            yield line | {"run": as_setting(line["run"])}


def as_setting(fields: Mapping[str, Any]) -> Setting:
    """The setting that `plain` wrote as an object of JSON, whose fields may be among others."""
    return Setting({name: as_numbers(each) for name, each in fields["values"].items()}, fields["environment"])


def as_lines(run: Setting, chunk: Chunk, active: np.ndarray, settings: Settings) -> Iterator[str]:
    """A line for each iteration of a chunk: null for NaN, infinity, and rows that are not active, `[n, R]`."""
    columns = {"environment_steps": chunk.steps.tolist()}
    for name, values in chunk.metrics.items():
        columns[name] = np.where(active & np.isfinite(values), values.astype(object), None).tolist()
    of_row = sorted((row, setting) for setting, rows in settings.rows.items() for row in rows)
    names = next(iter(settings.rows)).values
    rows = {PREFIX + name: plain([setting.values[name] for _, setting in of_row]) for name in names}
    for i in range(len(chunk.steps)):
        line = {"run": plain(run), "iteration": chunk.iteration + i}
        line |= {name: column[i] for name, column in columns.items()} | rows
        yield json.dumps(line, allow_nan=False) + "\n"


def truncate_metrics(directory: Path, run: Setting, num_iterations: int) -> None:
    """Removes the lines of a run in `metrics.jsonl` beyond its first `num_iterations` iterations."""
    kept = [line for line in read_lines(directory) if line["run"] != run or line["iteration"] < num_iterations]
    lines = [json.dumps(line | {"run": plain(line["run"])}) + "\n" for line in kept]
    write_text(directory / METRICS_FILE, "".join(lines))

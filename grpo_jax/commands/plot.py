"""Runs side by side, from their folders: `grpo-jax plot runs/grpo runs/ppo`."""

import dataclasses
import os
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import tyro

from grpo_jax.commands.harness.command import command, make_console, new_folder
from grpo_jax.commands.harness.figures import Form, Row, print_table
from grpo_jax.commands.harness.limits import OutFolder
from grpo_jax.commands.harness.parsing import invocation, parse_flags
from grpo_jax.errors import ConfigError
from grpo_jax.recording.figures import RETURN, plot_settings
from grpo_jax.recording.files import check_fields, read_json
from grpo_jax.recording.metrics_file import METRICS_FILE, VALUES, as_setting, read_metrics, read_settings
from grpo_jax.recording.run_folder import SUMMARY_FILE
from grpo_jax.recording.statistics import describe_seeds, estimate, iqm, probability_of_improvement
from grpo_jax.runs.progress import Chunk
from grpo_jax.runs.result import columns_of, final_return
from grpo_jax.runs.run_spec import NAME, Setting

PICTURE, PICTURES = "comparison.png", (".png", ".pdf", ".svg")


@dataclasses.dataclass
class Arguments:
    """Compares runs: learning curves, and the probability that each is better than the first."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of results, each of one run or several. The first run of the first folder is the baseline."""
    metric: str = RETURN
    """What the curves show, by its name in metrics.jsonl."""
    out: OutFolder | None = None
    """The picture, such as curves.pdf, or a folder for comparison.png; a new one under runs/ if left out."""
    format: Form = "table"
    """What the table is printed as."""


class SavedRun(NamedTuple):
    """A run as it is read from its folder, all seeds."""

    label: str
    environment: str
    chunk: Chunk  # of all iterations
    final_returns: np.ndarray | None  # [num_seeds] of the final evaluation; None before there is one


def read_runs(folder: Path, metric: str = RETURN) -> list[SavedRun]:
    """The runs in a folder, also if they are still being written; each setting of a run is one by itself.

    Raises ConfigError if there is no metrics.jsonl or nothing in it yet, or it does not have the metric.
    """
    path = folder / METRICS_FILE
    if not path.exists():
        what = f"{folder} is not the folder of a run: it has no {METRICS_FILE} (an unfinished sweep: {folder}/programs)"
        raise ConfigError(what if folder.exists() else f"there is no folder {folder}")
    chunks = read_metrics(folder)
    if not chunks:
        raise ConfigError(f"{path} has no iteration in it yet, or is of an older version")
    finals = _final_returns(folder / SUMMARY_FILE) if (folder / SUMMARY_FILE).exists() else {}
    runs, settings = [], read_settings(folder)
    for name, chunk in chunks.items():
        if metric not in chunk.metrics:
            raise ConfigError(f"{path} has no metric {metric!r}; known: {', '.join(sorted(chunk.metrics))}")
        for setting, rows in settings[name].rows.items():
            known, final = ": ".join(map(str, (each for each in (name, setting) if each.values))), finals.get(name)
            final = None if final is None or len(final) != chunk.steps.shape[1] else final[rows]
            runs.append(SavedRun(known, name.environment, columns_of(chunk, rows), final))
    return runs


def _final_returns(path: Path) -> dict[Setting, np.ndarray]:
    """The final returns of each run in summary.json."""
    finals = {}
    runs = read_json(path).get("runs")
    check_fields(path, {"runs": runs}, {"runs": list[dict[str, Any]]})
    for run in runs:
        final = run.get("final_return")
        known = {name: run.get(name) for name in ("environment", "values")}
        known |= {"per_seed": final.get("per_seed") if type(final) is dict else None}
        check_fields(path, known, {"environment": str, "values": VALUES, "per_seed": list[float | None]})
        finals[as_setting(known)] = np.array(known["per_seed"], float)
    return finals


def read_all(folders: tuple[Path, ...], metric: str) -> list[SavedRun]:
    by_folder = {folder.resolve(): read_runs(folder, metric) for folder in folders}
    if len(by_folder) == 1:
        return next(iter(by_folder.values()))
    labelled, parent = [], os.path.commonpath([folder.parent for folder in by_folder])
    for name, runs in ((str(folder.relative_to(parent)), runs) for folder, runs in by_folder.items()):
        is_one = len({run.label for run in runs}) == 1
        labelled += [run._replace(label=name if is_one else f"{name}: {run.label}") for run in runs]
    return labelled


def final_returns(runs: list[SavedRun]) -> list[np.ndarray]:
    """The final returns of each run, `[num_seeds]`; unless all have some, of the last training episodes."""
    if all(run.final_returns is not None for run in runs):
        return [run.final_returns for run in runs]
    return [final_return([run.chunk], run.chunk.steps.shape[1]) for run in runs]


def plot(runs: list[SavedRun], metric: str, path: Path) -> None:
    """A panel for each environment, with the learning curves."""
    best_first = sorted(zip(runs, final_returns(runs), strict=True), key=lambda run: -np.nan_to_num(iqm(run[1])))
    blocks = {Setting({NAME: run.label}, run.environment): run.chunk for run, _ in best_first}
    plot_settings(blocks, path, metric)


def table(runs: list[SavedRun]) -> list[Row]:
    """A row for each run."""
    rows = []
    for environment in dict.fromkeys(run.environment for run in runs):
        here = [run for run in runs if run.environment == environment]
        finals = final_returns(here)
        for run, final in zip(here, finals, strict=True):
            chance = () if run is here[0] else probability_of_improvement(final, finals[0])
            chance = chance[:1] if len(final) == len(finals[0]) == 1 else chance
            row = {"environment": environment, "run": run.label, "return": estimate(final)}
            row |= {"P(better than the first)": chance, "seeds": len(final), "steps a seed": run.chunk.steps[-1].mean()}
            rows.append(row)
    return rows


def main(arguments: Arguments) -> None:
    if not arguments.runs:
        raise ConfigError(f"no folders given; write {invocation('plot')} runs/one runs/other")
    out = arguments.out or new_folder("plot")
    path = out if out.suffix in PICTURES else out / PICTURE
    if path is not out and out.suffix[1:].isalpha():
        raise ConfigError(f"--out {out} is no picture: use {', '.join(PICTURES)}, or a folder")
    runs = read_all(arguments.runs, arguments.metric)
    plot(runs, arguments.metric, path)
    console = make_console(stderr=arguments.format != "table")
    print_table(console, table(runs), arguments.format)
    console.print(f"Returns: {describe_seeds(min(run.chunk.steps.shape[1] for run in runs))}", soft_wrap=True)
    console.print(f"Curves in {path}", soft_wrap=True)


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

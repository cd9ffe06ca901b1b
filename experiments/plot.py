"""Runs side by side, from their folders: `python -m experiments.plot runs/grpo runs/ppo`."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import tyro
from rich.table import Table

from experiments.harness.command import command
from experiments.harness.console import make_console
from grpo_jax.errors import ConfigError
from grpo_jax.recording.files import METRICS_FILE, SUMMARY_FILE, read_lines
from grpo_jax.recording.statistics import (
    bootstrap_interval,
    iqm,
    learning_curve,
    performance_profile,
    probability_of_improvement,
)

RETURN = "episode/return_mean"
MEANS_OF_EPISODES = (RETURN, "episode/length_mean")


@dataclasses.dataclass
class Arguments:
    """Compares runs: learning curves, performance profiles, and how probably each is better than the first."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders that experiments wrote; each may hold several runs. The first one's first run is the baseline."""
    metric: str = RETURN
    """What the curves show, by its name in metrics.jsonl."""
    out: Path = Path("comparison.png")
    """The picture."""


class Recorded(NamedTuple):
    """A run as its folder has it, all seeds."""

    label: str
    environment: str
    steps: np.ndarray  # [num_iterations, num_seeds] environment steps made
    values: np.ndarray  # [num_iterations, num_seeds] of the metric, NaN where there is none
    counts: np.ndarray | None  # [num_iterations, num_seeds] episodes that it is a mean of; None of another metric
    final_returns: np.ndarray | None  # [num_seeds] of the final evaluation; None before there is one


def read_runs(folder: Path, metric: str = RETURN) -> list[Recorded]:
    """The runs of a folder, also of one that is still being written.

    Raises:
      ConfigError: there is no metrics.jsonl or nothing in it yet, or the metric is in none of its lines.
    """
    path = folder / METRICS_FILE
    if not path.exists():
        raise ConfigError(f"{folder} is not the folder of a run: it has no {METRICS_FILE}")
    lines: dict[str, list[dict]] = {}
    for line in read_lines(folder):
        lines.setdefault(line["run"], []).append(line)
    if not lines:
        raise ConfigError(f"{path} has no iteration in it yet")
    finals = {}
    if (folder / SUMMARY_FILE).exists():
        for run in json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))["runs"]:
            finals[f"{run['algorithm']} on {run['environment']}"] = np.array(run["final_return"]["per_seed"], float)

    runs = []
    for name, of_run in lines.items():
        if metric not in of_run[0]:
            known = sorted(key for key in of_run[0] if "/" in key)
            raise ConfigError(f"{path} has no metric {metric!r}; known: {', '.join(known)}")
        label, _, environment = name.rpartition(" on ")
        values = np.array([line[metric] for line in of_run], float)  # null becomes NaN
        steps = np.array([line["environment_steps"] for line in of_run])
        counts = np.array([line["episode/count"] for line in of_run], float) if metric in MEANS_OF_EPISODES else None
        runs.append(Recorded(label, environment, steps, values, counts, finals.get(name)))
    return runs


def read_all(folders: tuple[Path, ...], metric: str) -> list[Recorded]:
    """The runs of all folders, labelled so that they can be told apart."""
    of_folders = {folder.resolve(): read_runs(folder, metric) for folder in folders}
    if len(of_folders) == 1:
        return next(iter(of_folders.values()))
    labelled = []
    for name, runs in zip(short_names(of_folders), of_folders.values(), strict=True):
        alone = len({run.label for run in runs}) == 1
        labelled += [run._replace(label=name if alone else f"{name}: {run.label}") for run in runs]
    return labelled


def short_names(folders: Iterable[Path]) -> list[str]:
    """The shortest end of each path that no other path ends in: `a/x`, `b/x` and `y` of `/a/x`, `/b/x` and `/b/y`.

    Args:
      folders: absolute paths, no two of them equal.
    """
    parts = [folder.parts for folder in folders]

    def is_alone(end: tuple[str, ...]) -> bool:
        return sum(other[-len(end) :] == end for other in parts) == 1

    ends = ([mine[-count:] for count in range(1, len(mine) + 1)] for mine in parts)
    return [str(Path(*next(filter(is_alone, of_mine)))) for of_mine in ends]


def final_returns(runs: list[Recorded]) -> tuple[str, list[np.ndarray]]:
    """What they are called, and of each run `[num_seeds]`: evaluated if all of them were, else as last seen."""
    if all(run.final_returns is not None for run in runs):
        return "final return", [run.final_returns for run in runs]

    def last(column):
        known = column[~np.isnan(column)]
        return known[-1] if len(known) else np.nan

    return "last training value", [np.apply_along_axis(last, 0, run.values) for run in runs]


def plot(runs: list[Recorded], metric: str, path: Path) -> None:
    """A row of panels for each environment: curves, performance profiles, probabilities of improvement."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    environments = list(dict.fromkeys(run.environment for run in runs))
    labels = list(dict.fromkeys(run.label for run in runs))
    colors = {label: f"C{i % 10}" for i, label in enumerate(labels)}
    figure, axes = plt.subplots(
        len(environments), 3, figsize=(15, 4 * len(environments)), squeeze=False, layout="constrained"
    )
    for environment, (curves, profiles, chances) in zip(environments, axes, strict=True):
        here = [run for run in runs if run.environment == environment]
        name, finals = final_returns(here)
        for run in here:
            if not np.isnan(run.values).all():
                curve = learning_curve(run.steps, run.values, run.counts)
                curves.plot(curve.steps, curve.mean, color=colors[run.label], label=run.label)
                curves.fill_between(curve.steps, curve.low, curve.high, color=colors[run.label], alpha=0.2, linewidth=0)
        curves.set(title=environment, xlabel="environment steps (each seed)", ylabel=f"{metric} (IQM, 95% interval)")
        curves.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
        curves.legend(frameon=False, fontsize="small")

        low, high = np.nanquantile(np.concatenate(finals), [0, 1])
        margin = 0.05 * (high - low or 1.0)
        thresholds = np.linspace(low - margin, high + margin, 201)
        for run, final in zip(here, finals, strict=True):
            share, below, above = performance_profile(final, thresholds)
            profiles.plot(thresholds, share, color=colors[run.label])
            profiles.fill_between(thresholds, below, above, color=colors[run.label], alpha=0.2, linewidth=0)
        profiles.set(title="performance profile", xlabel=f"{name} τ", ylabel="share of seeds above τ")
        profiles.set_ylim(-0.02, 1.02)

        rows = range(len(here) - 1)
        for row, run, final in zip(rows, here[1:], finals[1:], strict=True):
            chance, below, above = probability_of_improvement(final, finals[0])
            error = [[chance - below], [above - chance]]
            chances.errorbar(chance, row, xerr=error, fmt="o", color=colors[run.label], capsize=3)
        chances.axvline(0.5, color="0.6", linestyle="--", linewidth=0.8, zorder=0)
        chances.set_yticks(rows, [run.label for run in here[1:]])
        chances.set(xlim=(-0.02, 1.02), ylim=(max(len(rows), 1) - 0.5, -0.5))
        chances.set_title(f"P({name} > that of {here[0].label})")
        for axis in (curves, profiles, chances):
            axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def table(runs: list[Recorded]) -> Table:
    """All runs, each beside the first on its environment."""
    rendered = Table("environment", "run", "seeds", "steps a seed", "return", "P(better than the first)")
    for environment in dict.fromkeys(run.environment for run in runs):
        here = [run for run in runs if run.environment == environment]
        _, finals = final_returns(here)
        for run, final in zip(here, finals, strict=True):
            low, high = bootstrap_interval(final)
            chance, below, above = probability_of_improvement(final, finals[0])
            rendered.add_row(
                *(environment, run.label, str(len(final)), f"{run.steps[-1].mean():,.0f}"),
                f"{iqm(final):.4g} [{low:.4g}, {high:.4g}]",
                "" if run is here[0] else f"{chance:.2f} [{below:.2f}, {above:.2f}]",
            )
    return rendered


def main(arguments: Arguments) -> None:
    if not arguments.runs:
        raise ConfigError("no folders given; write python -m experiments.plot runs/one runs/other")
    import matplotlib.figure

    formats = matplotlib.figure.Figure().canvas.get_supported_filetypes()
    if arguments.out.suffix.lower().removeprefix(".") not in formats:
        raise ConfigError(f"--out {arguments.out} is no picture that can be drawn: use one of .{', .'.join(formats)}")
    runs = read_all(arguments.runs, arguments.metric)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    plot(runs, arguments.metric, arguments.out)
    console = make_console()
    console.print(table(runs))
    console.print(f"Drawn in {arguments.out}", soft_wrap=True)


if __name__ == "__main__":
    command(lambda: main(tyro.cli(Arguments)))

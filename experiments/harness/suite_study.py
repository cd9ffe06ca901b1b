"""Comparisons on many environments, one after another, whose results are kept beside those of earlier runs."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from grpo_jax import Config
from grpo_jax.algorithms import name_of
from grpo_jax.errors import ConfigError
from grpo_jax.recording import Curve, learning_curve
from grpo_jax.recording.files import write_json
from grpo_jax.recording.plan import Plan

from .command import hardware
from .figures import draw_curves
from .runs import Run, Score, sampled_return, score_summary
from .study import Study, StudyArguments

LONGEST_EVALUATION = 2500
"""Steps after which an episode of an evaluation is cut off."""
SUMMARY, TABLE, CURVES = "summary.json", "table.md", "learning_curves.png"


@dataclasses.dataclass
class SuiteArguments(StudyArguments):
    """The flags of a comparison on many environments."""

    environments: tuple[str, ...] = ()
    """Names of environments, which are run even if the folder has their results; by default all without."""
    num_seeds: int = 5
    """Independent runs of each."""
    steps_factor: float = 1.0
    """Multiplies the environment steps."""


def run_suite(
    name: str,
    arguments: SuiteArguments,
    environments: Sequence[str],
    plan: Callable[[str], list[Plan]],
    header: Sequence[str],
    cells: Callable[[str, dict], list[str]],
) -> None:
    """Makes the planned runs on each environment, and writes all results of the folder after each.

    Args:
      name: of the comparison.
      arguments: flags of the command line.
      environments: names of all its environments, in the order of the table.
      plan: the runs on an environment.
      header: of the table's columns after the first, which is the environment.
      cells: those columns of an environment, from its name and its entry in summary.json.
    """
    done = read_results(arguments.out)
    chosen = arguments.environments or tuple(name for name in environments if name not in done)
    plans = {}
    for environment in chosen:
        try:
            plans[environment] = plan(environment)
        except ConfigError as error:
            if arguments.environments:
                raise
            print(f"left out: {error}")  # such as a suite that is not installed
    for environment in plans:
        # A run that can be resumed needs a folder with a known name.
        folder = arguments.out / "runs" / environment.replace(":", "_") if arguments.checkpoint_every else None
        study = Study(
            f"{name}_{environment.replace(':', '_')}",
            plans[environment],
            dataclasses.replace(arguments, out=folder),
            score=make_score(plans[environment][0].config),
        )
        study.run_all()
        # Read again: another process may have added other environments.
        results = read_results(arguments.out) | {environment: summarise_environment(study.runs)}
        in_order = [name for name in environments if name in results]
        results = {name: results[name] for name in dict.fromkeys(in_order + list(results))}
        write_results(results, arguments.out, header, cells)
    print((arguments.out / TABLE).read_text())
    print(f"Results in {arguments.out}: {TABLE}, {SUMMARY}, {CURVES}")


def read_results(out: Path) -> dict:
    """The results in a folder, by the names of the environments.

    Raises:
      ConfigError: its summary.json is of something else.
    """
    summary = out / SUMMARY
    try:
        results = json.loads(summary.read_text()) if summary.exists() else {}
    except ValueError as error:
        raise ConfigError(f"{summary} cannot be read: {error}; remove it, or give another --out") from error
    if not (isinstance(results, dict) and all(isinstance(entry, dict) for entry in results.values())):
        raise ConfigError(f"{summary} has no results by environment; give another --out")
    return results


def make_score(config: Config) -> Score:
    """The mean return of about 25,000 steps of episodes: many if they are short, as their returns often vary most."""
    max_steps = min(config.env.max_steps, LONGEST_EVALUATION)
    return sampled_return(min(256, max(16, 25_600 // max_steps)), max_steps=max_steps)


def summarise_environment(runs: list[Run]) -> dict:
    """The entry of an environment in summary.json.

    The random policy's return is that of the last run's first rollouts. With one-episode groups these are whole
    episodes of policies as they are initialised: all actions about equally likely, or Gaussian with a deviation of half
    the bounds' width.
    """
    first, *_, last = runs
    return {
        "steps": int(first.hyperparams.total_steps),
        "random": rounded(np.mean(last.returns[0])),
        "num_seeds": len(first.final_returns),
        "hardware": hardware(),
        "runs": {run.label: summarise_run(run) for run in runs},
    }


def summarise_run(run: Run) -> dict:
    """Final returns, times and the curve, to four digits."""
    curve = learning_curve(run.result.steps, run.returns, run.counts, num_points=50)
    times = {
        "wall_seconds": run.wall_seconds,
        "core_seconds": run.core_seconds,
        "steps_per_second": run.steps_per_second,
    }
    return {
        "algorithm": name_of(run.config.algorithm),
        **{name: rounded(value) for name, value in (score_summary(run.final_returns) | times).items()},
        "curve": {name: rounded(values) for name, values in curve._asdict().items()},
    }


def rounded(value: ArrayLike) -> float | list[float]:
    """To four significant digits; an array as a list."""
    return [rounded(element) for element in value] if np.ndim(value) else float(f"{value:.4g}")


def write_results(
    results: Mapping[str, dict], out: Path, header: Sequence[str], cells: Callable[[str, dict], list[str]]
) -> None:
    """Writes summary.json, and draws the table and the curves of the results in it."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / SUMMARY, results)
    header = ["environment", *header]
    rows = [header, ["---"] * len(header)] + [[name, *cells(name, entry)] for name, entry in results.items()]
    (out / TABLE).write_text("\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n")
    panels = {
        name: {label: Curve(*map(np.asarray, run["curve"].values())) for label, run in entry["runs"].items()}
        for name, entry in results.items()
    }
    draw_curves(panels, out / CURVES, "environment steps", min(entry["num_seeds"] for entry in results.values()))


def score_cell(run: dict, usual: Sequence[str] = ()) -> str:
    """The interquartile mean and its interval, with the name of the algorithm unless that is one of the usual ones."""
    low, high = run["ci95"]
    algorithm = "" if run["algorithm"] in usual else f" `{run['algorithm']}`"
    return f"{run['iqm']:.4g} [{low:.4g}, {high:.4g}]{algorithm}"

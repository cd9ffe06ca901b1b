"""Comparisons on many environments, one after another, whose results are kept beside those of earlier runs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
from numpy.typing import ArrayLike

from grpo_jax import Config, TrainState, tuned
from grpo_jax.algorithms import name_of
from grpo_jax.commands.harness.limits import Between, Seeds
from grpo_jax.commands.harness.study import CommandStudy, StudyArguments
from grpo_jax.errors import ConfigError
from grpo_jax.recording.figures import draw_curves
from grpo_jax.recording.statistics import Curve, learning_curve
from grpo_jax.runs.run_spec import RunSpec, folder_name, hardware
from grpo_jax.sweeps.runs import Run, Score, sampled_return, score_summary

from .summaries import SUMMARY, TABLE, chosen, read_results, write_results

LONGEST_EVALUATION = 2500
"""Steps after which an episode of an evaluation is cut off."""
CURVES = "learning_curves.png"


@dataclasses.dataclass
class SuiteArguments(StudyArguments):
    """The flags of a comparison on many environments."""

    environments: tuple[str, ...] = ()
    """Names of environments, which are run even if the folder has their results; by default those without any, or
    without those of one of the methods."""
    methods: tuple[str, ...] = ()
    """Methods to run, by the names of their columns; the folder's results of the others stay. By default all."""
    num_seeds: Seeds = 5
    """Independent runs of each."""
    steps_factor: Annotated[float, Between(1e-6, 1e6, "a number from 1e-6 to 1e6")] = 1.0
    """Multiplies the environment steps."""


def run_suite(
    name: str,
    arguments: SuiteArguments,
    environments: Sequence[str],
    plan: Callable[[str], list[RunSpec]],
    header: Sequence[str],
    cells: Callable[[str, dict], list[str]],
) -> None:
    """Makes the planned runs on each environment, and writes all results of the folder after each.

    The first column of the table is the environment; `header` and `cells(name, entry in summary.json)` give the others.
    """
    present = read_results(arguments.out)
    asked = set(arguments.methods)
    absent = [name for name in environments if name not in present or not present[name]["runs"].keys() >= asked]
    plans = {}
    for environment in arguments.environments or absent:
        try:
            plans[environment] = plan(environment)
        except ConfigError as error:
            if arguments.environments:
                raise
            print(f"left out: {error}")  # such as a suite that is not installed
    # Not left out: no environment has an unknown method.
    plans = {name: chosen_plans(every, arguments, present.get(name)) for name, every in plans.items()}
    if not plans and not present:
        raise ConfigError("none of the environments can be made, for the reasons above; install a suite that they need")
    for environment in plans:
        # A run that can be resumed needs a folder with a known name, and other methods may have been run before.
        folder = arguments.out / "runs" / folder_name("_".join((environment, *arguments.methods)))
        study = CommandStudy(
            folder_name(f"{name}_{environment}"),
            plans[environment],
            dataclasses.replace(arguments, out=folder if arguments.recording.checkpoint_every else None),
            score=make_score(plans[environment][0].config),
        )
        study.run_all()
        # Read again: another process may have added other environments.
        results = read_results(arguments.out)
        kept, new = results.get(environment, {}) if asked else {}, summarise_environment(study.runs)
        results[environment] = kept | new | {"runs": kept.get("runs", {}) | new["runs"]}
        in_order = [name for name in environments if name in results]
        results = {name: results[name] for name in dict.fromkeys(in_order + list(results))}
        write_comparison(results, arguments.out, header, cells)
    print((arguments.out / TABLE).read_text())
    print(f"Results in {arguments.out}: {TABLE}, {SUMMARY}, {CURVES}")


def chosen_plans(plans: list[RunSpec], arguments: SuiteArguments, present: dict | None) -> list[RunSpec]:
    """The plans of the methods that the flags name, or all of them, in the order of the table.

    Raises ConfigError if a method is unknown, or the results that stay beside these are of other steps or seeds.
    """
    by_label = {plan.label: plan for plan in plans}
    names = chosen(by_label, arguments.methods, "method")
    plans = [plan for plan in plans if plan.label in names]
    first = plans[0]
    ours = int(first.hyperparams.total_steps), arguments.num_seeds
    if arguments.methods and present and ours != (present["steps"], present["num_seeds"]):
        raise ConfigError(
            f"{first.config.environment} has results of {present['steps']:,} steps and {present['num_seeds']} seeds in "
            f"{arguments.out}, these would be of {ours[0]:,} and {ours[1]}; leave out --methods, or give another --out "
            "or other --environments"
        )
    return plans


def make_plans(
    arguments: SuiteArguments, environment: str, algorithms: Mapping[str, str], total_steps: float
) -> list[RunSpec]:
    """Runs of the named algorithms, by their labels, over `total_steps * steps_factor` environment steps."""
    total_steps = int(arguments.steps_factor * total_steps)
    return [
        RunSpec(label, *tuned(environment, name, total_steps=total_steps), arguments.training_keys)
        for label, name in algorithms.items()
    ]


def make_score(config: Config) -> Score:
    """The mean return of about 25,000 steps of episodes: many if they are short, as their returns often vary most."""
    max_steps = min(config.env.max_steps, LONGEST_EVALUATION)
    sampled = sampled_return(min(256, max(16, 25_600 // max_steps)))
    if max_steps == config.env.max_steps:
        return sampled

    def of_cut_episodes(config: Config, state: TrainState, key: jax.Array) -> jax.Array:
        params = dict(config.env_params) | {"max_steps_in_episode": max_steps}
        return sampled.function(dataclasses.replace(config, env_params=params), state, key)

    return sampled._replace(function=of_cut_episodes)


def summarise_environment(runs: list[Run]) -> dict:
    """The entry of an environment in summary.json.

    The random policy's return is that of the first rollouts of one-episode groups, if a run has those: whole episodes
    of policies as they are initialised, with all actions about equally likely, or Gaussian with a deviation of half the
    bounds' width.
    """
    first = runs[0]
    whole = [run for run in runs if run.config.algorithm.start.from_reset]
    return {
        "steps": int(first.hyperparams.total_steps),
        **({"random": rounded(np.mean(whole[0].returns[0]))} if whole else {}),
        "num_seeds": len(first.final_returns),
        "hardware": hardware(),
        "runs": {str(run.setting): summarise_run(run) for run in runs},
    }


def summarise_run(run: Run) -> dict:
    curve = learning_curve(
        run.result.steps, run.returns, np.nan_to_num(run.result.metrics["episode/count"]), num_points=50
    )
    times = {name: getattr(run, name) for name in ("wall_seconds", "core_seconds", "steps_per_second")}
    return {
        "algorithm": name_of(run.config.algorithm),
        **{name: rounded(value) for name, value in (score_summary(run.final_returns) | times).items()},
        "curve": {name: rounded(values) for name, values in curve._asdict().items()},
    }


def rounded(value: ArrayLike) -> float | list[float]:
    """To four significant digits; an array as a list."""
    return [rounded(element) for element in value] if np.ndim(value) else float(f"{value:.4g}")


def write_comparison(
    results: Mapping[str, dict], out: Path, header: Sequence[str], cells: Callable[[str, dict], list[str]]
) -> None:
    """Writes summary.json, and draws the table and the curves of the results in it."""
    write_results(results, out, ["environment", *header], lambda name, entry: [name, *cells(name, entry)])
    panels = {
        name: {label: Curve(*map(np.asarray, run["curve"].values())) for label, run in entry["runs"].items()}
        for name, entry in results.items()
    }
    draw_curves(panels, out / CURVES, "environment steps", min(entry["num_seeds"] for entry in results.values()))


def score_cell(run: dict | None, usual: Sequence[str] = ()) -> str:
    """The interquartile mean and its interval, with the name of the algorithm unless that is one of the usual ones."""
    if run is None:
        return ""
    low, high = run["ci95"]
    algorithm = "" if run["algorithm"] in usual else f" `{run['algorithm']}`"
    return f"{run['iqm']:.4g} [{low:.4g}, {high:.4g}]{algorithm}"

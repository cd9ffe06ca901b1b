"""PPO and GRPO on every environment of gymnax: `python -m experiments.gymnax_suite`."""

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from grpo_jax.algorithms import name_of
from grpo_jax.recording import Curve, learning_curve
from grpo_jax.recording.files import write_json
from grpo_jax.recording.plan import Plan

from .harness.command import command, hardware
from .harness.figures import draw_curves
from .harness.parsing import parse_flags
from .harness.runs import Run, make_plan, sampled_return, score_summary
from .harness.study import Study, StudyArguments

SUMMARY, TABLE, CURVES = "summary.json", "table.md", "learning_curves.png"


class Entry(NamedTuple):
    """An environment of the suite."""

    steps: int = 300_000  # environment steps of each seed
    goal: float | None = None  # the mean return that the better of the two should reach
    published: str = ""
    variant: str = "grpo"  # of GRPO


# Where many steps are rewarded and most of a return does not depend on a single step.
RETURN_TO_GO = "grpo_return_to_go"

SUITE = {
    "CartPole-v1": Entry(steps=500_000, goal=490.0, published="500"),
    "Acrobot-v1": Entry(steps=500_000, goal=-90.0, published="-80"),
    "MountainCar-v0": Entry(steps=400_000, goal=-120.0, published="-118"),
    "MountainCarContinuous-v0": Entry(steps=200_000, goal=85.0, published="92", variant=RETURN_TO_GO),
    "Pendulum-v1": Entry(steps=200_000, goal=-250.0, published="-130", variant=RETURN_TO_GO),
    "Catch-bsuite": Entry(goal=0.98, published="1"),
    "DeepSea-bsuite": Entry(steps=150_000, goal=0.95, variant="rloo"),
    "MemoryChain-bsuite": Entry(steps=200_000, goal=0.95),
    "UmbrellaChain-bsuite": Entry(steps=100_000, goal=0.8, variant=RETURN_TO_GO),
    "DiscountingChain-bsuite": Entry(steps=100_000),
    "SimpleBandit-bsuite": Entry(steps=50_000),
    "BernoulliBandit-misc": Entry(steps=150_000, goal=85.0, published="90", variant=RETURN_TO_GO),
    "GaussianBandit-misc": Entry(steps=150_000, published="0", variant=RETURN_TO_GO),
    "FourRooms-misc": Entry(goal=0.95, published="1"),
    "FrozenLake-misc": Entry(),
    "MetaMaze-misc": Entry(published="32", variant=RETURN_TO_GO),
    "PointRobot-misc": Entry(published="10", variant=RETURN_TO_GO),
    "Reacher-misc": Entry(variant=RETURN_TO_GO),
    "Swimmer-misc": Entry(variant=RETURN_TO_GO),
    "Pong-misc": Entry(variant=RETURN_TO_GO),
    "Breakout-MinAtar": Entry(steps=500_000, published="17.1 (27.7 at 5M)", variant=RETURN_TO_GO),
    "SpaceInvaders-MinAtar": Entry(steps=500_000, published="34.6 (154 at 5M)", variant=RETURN_TO_GO),
    "Asterix-MinAtar": Entry(steps=500_000, published="1.4 (5.9 at 5M)", variant=RETURN_TO_GO),
    "Freeway-MinAtar": Entry(steps=500_000, published="17.2 (49.9 at 5M)", variant=RETURN_TO_GO),
    "Seaquest-MinAtar": Entry(steps=100_000, variant=RETURN_TO_GO),
}
"""All environments but MNISTBandit, which downloads its images.

Published returns are from gymnax's README (best of PPO and evolution strategies,
https://github.com/RobertTLange/gymnax); for MinAtar, of purejaxrl's PPO on gymnax 1.0.1, mean of 3 seeds, after 500,000
of its 5 million steps, over which its learning rate decays. DeepSea has no division by the group's standard deviation,
which would magnify the small costs of unlucky groups. SimpleBandit has no goal: gymnax draws new arms for each episode
of one pull, so that every policy has a mean return of 0.5.
"""


@dataclasses.dataclass
class Arguments(StudyArguments):
    """Trains PPO and GRPO on gymnax's environments with the settings of each, and compares them.

    The results of an environment are written as soon as it is done, beside those that the folder has already.
    """

    environments: tuple[str, ...] = ()
    """Names of gymnax environments, which are run even if the folder has their results; by default all without."""
    num_seeds: int = 5
    """Independent runs of each."""
    steps_factor: float = 1.0
    """Multiplies the environment steps."""
    out: Path = Path("runs/gymnax_suite")
    """Folder for the results."""


def main(arguments: Arguments) -> None:
    summary = arguments.out / SUMMARY
    results = json.loads(summary.read_text()) if summary.exists() else {}
    environments = arguments.environments or tuple(name for name in SUITE if name not in results)
    plans = {environment: make_plans(arguments, environment) for environment in environments}
    for environment in environments:
        # A run that can be resumed needs a folder with a known name.
        out = arguments.out / "runs" / environment if arguments.checkpoint_every else None
        study = Study(
            f"gymnax_suite_{environment}",
            plans[environment],
            dataclasses.replace(arguments, out=out),
            score=sampled_return(num_evaluation_episodes(plans[environment][0])),
        )
        study.run_all()
        results[environment] = summarise_environment(study.runs)
        in_order = [name for name in SUITE if name in results]
        write_results({name: results[name] for name in dict.fromkeys(in_order + list(results))}, arguments.out)
    print((arguments.out / TABLE).read_text())
    print(f"Results in {arguments.out}: {TABLE}, {SUMMARY}, {CURVES}")


def num_evaluation_episodes(plan: Plan) -> int:
    """About 25,000 steps of them: many if they are short, as their returns often vary most."""
    return min(256, max(16, 25_600 // plan.config.env.max_steps))


def make_plans(arguments: Arguments, environment: str) -> list[Plan]:
    """The runs of PPO and of GRPO."""
    entry = SUITE.get(environment, Entry())
    total_steps = int(arguments.steps_factor * entry.steps)
    algorithms = {"PPO": "ppo", "GRPO": entry.variant}
    return [
        make_plan(environment, name, arguments.training_keys, total_steps=total_steps, label=label)
        for label, name in algorithms.items()
    ]


def summarise_environment(runs: list[Run]) -> dict:
    """The entry of an environment in summary.json.

    The random policy's return is that of GRPO's first rollouts, whole episodes of a policy as it is initialised: all
    actions about equally likely, or Gaussian with a deviation of half the bounds' width.
    """
    ppo, grpo = runs
    return {
        "steps": int(ppo.hyperparams.total_steps),
        "random": rounded(np.mean(grpo.returns[0])),
        "num_seeds": len(ppo.final_returns),
        "hardware": hardware(),
        "runs": {run.label: summarise_run(run) for run in runs},
    }


def summarise_run(run: Run) -> dict:
    """Final returns, times and the curve, to four digits."""
    curve = learning_curve(run.result.steps, run.returns, run.counts, num_points=50)
    times = {"wall_seconds": run.wall_seconds, "core_seconds": run.core_seconds}
    return {
        "algorithm": name_of(run.config.algorithm),
        **{name: rounded(value) for name, value in (score_summary(run.final_returns) | times).items()},
        "curve": {name: rounded(values) for name, values in curve._asdict().items()},
    }


def rounded(value: ArrayLike) -> float | list[float]:
    """To four significant digits; an array as a list."""
    return [rounded(element) for element in value] if np.ndim(value) else float(f"{value:.4g}")


def write_results(results: dict, out: Path) -> None:
    """Writes summary.json, and draws the table and the curves of the results in it."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / SUMMARY, results)
    header = ["environment", "steps", "PPO", "GRPO", "random", "published", "goal", "PPO's core time"]
    rows = [header, ["---"] * len(header)] + [row(name, entry) for name, entry in results.items()]
    (out / TABLE).write_text("\n".join(f"| {' | '.join(cells)} |" for cells in rows) + "\n")
    panels = {
        name: {label: Curve(*map(np.asarray, run["curve"].values())) for label, run in entry["runs"].items()}
        for name, entry in results.items()
    }
    draw_curves(panels, out / CURVES, "environment steps", min(entry["num_seeds"] for entry in results.values()))


def row(environment: str, result: dict) -> list[str]:
    """The cells of one environment, with the name of a variant of GRPO."""

    def cell(run: dict) -> str:
        low, high = run["ci95"]
        variant = "" if run["algorithm"] in ("ppo", "grpo") else f" `{run['algorithm']}`"
        return f"{run['iqm']:.4g} [{low:.4g}, {high:.4g}]{variant}"

    entry = SUITE.get(environment, Entry())
    ppo, grpo = result["runs"]["PPO"], result["runs"]["GRPO"]
    goal = ""
    if entry.goal is not None:
        goal = f"{entry.goal:g}" + ("" if max(ppo["iqm"], grpo["iqm"]) >= entry.goal else " (missed)")
    cells = [f"{result['steps']:,}", cell(ppo), cell(grpo), f"{result['random']:.4g}", entry.published, goal]
    return [environment, *cells, f"{ppo['core_seconds']:.0f} s"]


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

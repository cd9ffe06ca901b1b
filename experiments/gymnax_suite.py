"""PPO and GRPO on every environment of gymnax: `python -m experiments.gymnax_suite`."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import tyro

from experiments.harness.command import command, hardware
from experiments.harness.figures import draw_curves
from experiments.harness.runs import Plan, Run, make_plan, sampled_return
from experiments.harness.study import Study, StudyArguments
from grpo_jax.algorithms import name_of
from grpo_jax.recording.files import write_json
from grpo_jax.recording.statistics import Curve, bootstrap_interval, iqm, learning_curve

SUMMARY, TABLE, CURVES = "summary.json", "table.md", "learning_curves.png"

VARIANTS = {
    "MountainCarContinuous-v0": "grpo_return_to_go",
    "Pendulum-v1": "grpo_return_to_go",
    "Reacher-misc": "grpo_return_to_go",
    "Swimmer-misc": "grpo_return_to_go",
    "PointRobot-misc": "grpo_return_to_go",
    "UmbrellaChain-bsuite": "grpo_return_to_go",
    "BernoulliBandit-misc": "grpo_return_to_go",
    "GaussianBandit-misc": "grpo_return_to_go",
    "MetaMaze-misc": "grpo_return_to_go",
    "Pong-misc": "grpo_return_to_go",
    "Asterix-MinAtar": "grpo_return_to_go",
    "Breakout-MinAtar": "grpo_return_to_go",
    "Freeway-MinAtar": "grpo_return_to_go",
    "Seaquest-MinAtar": "grpo_return_to_go",
    "SpaceInvaders-MinAtar": "grpo_return_to_go",
    "DeepSea-bsuite": "rloo",
}
"""Of GRPO, where another suits better: returns-to-go where many steps pay and most of a return is not a step's doing;
no division by the group's deviation where that would blow up the small costs of unlucky groups."""

STEPS = {
    "CartPole-v1": 500_000,
    "Acrobot-v1": 500_000,
    "MountainCar-v0": 400_000,
    "MountainCarContinuous-v0": 200_000,
    "Pendulum-v1": 200_000,
    "MemoryChain-bsuite": 200_000,
    "UmbrellaChain-bsuite": 100_000,
    "DiscountingChain-bsuite": 100_000,
    "SimpleBandit-bsuite": 50_000,
    "BernoulliBandit-misc": 150_000,
    "GaussianBandit-misc": 150_000,
    "DeepSea-bsuite": 150_000,
    "Asterix-MinAtar": 500_000,
    "Breakout-MinAtar": 500_000,
    "Freeway-MinAtar": 500_000,
    "SpaceInvaders-MinAtar": 500_000,
    "Seaquest-MinAtar": 100_000,
}
"""Environment steps a seed may take, 300,000 where nothing is said."""

PUBLISHED = {
    "CartPole-v1": "500",
    "Pendulum-v1": "-130",
    "Acrobot-v1": "-80",
    "MountainCar-v0": "-118",
    "MountainCarContinuous-v0": "92",
    "Catch-bsuite": "1",
    "FourRooms-misc": "1",
    "MetaMaze-misc": "32",
    "PointRobot-misc": "10",
    "BernoulliBandit-misc": "90",
    "GaussianBandit-misc": "0",
    "Breakout-MinAtar": "17.1 (27.7 at 5M)",
    "SpaceInvaders-MinAtar": "34.6 (154 at 5M)",
    "Asterix-MinAtar": "1.4 (5.9 at 5M)",
    "Freeway-MinAtar": "17.2 (49.9 at 5M)",
}
"""gymnax's own README (best of PPO and evolution strategies, https://github.com/RobertTLange/gymnax). Of MinAtar
purejaxrl's PPO on gymnax 1.0.1, mean of 3 seeds, after 500,000 of its 5 million steps, over which its learning rate
decays.
"""

GOALS = {
    "CartPole-v1": 490.0,
    "Acrobot-v1": -90.0,
    "MountainCar-v0": -120.0,
    "MountainCarContinuous-v0": 85.0,
    "Pendulum-v1": -250.0,
    "Catch-bsuite": 0.98,
    "DeepSea-bsuite": 0.95,
    "MemoryChain-bsuite": 0.95,
    "UmbrellaChain-bsuite": 0.8,
    "BernoulliBandit-misc": 85.0,
    "FourRooms-misc": 0.95,
}
"""The mean return that the better of the two should reach. SimpleBandit has none: gymnax draws its arms anew for each
episode, which is one pull and shows nothing of them, so that every policy is paid 0.5."""

ENVIRONMENTS = (
    "CartPole-v1",
    "Acrobot-v1",
    "MountainCar-v0",
    "MountainCarContinuous-v0",
    "Pendulum-v1",
    "Catch-bsuite",
    "DeepSea-bsuite",
    "MemoryChain-bsuite",
    "UmbrellaChain-bsuite",
    "DiscountingChain-bsuite",
    "SimpleBandit-bsuite",
    "BernoulliBandit-misc",
    "GaussianBandit-misc",
    "FourRooms-misc",
    "FrozenLake-misc",
    "MetaMaze-misc",
    "PointRobot-misc",
    "Reacher-misc",
    "Swimmer-misc",
    "Pong-misc",
    "Breakout-MinAtar",
    "SpaceInvaders-MinAtar",
    "Asterix-MinAtar",
    "Freeway-MinAtar",
    "Seaquest-MinAtar",
)
"""All but MNISTBandit, which downloads its images."""


@dataclasses.dataclass
class Arguments(StudyArguments):
    """Trains PPO and GRPO on gymnax's environments with the settings of each, and compares them.

    The results of an environment are written as soon as it is done, beside those that the folder has already.
    """

    environments: tuple[str, ...] = ()
    """Names of gymnax environments, to be run even if the folder has them; if left out, all that it has not."""
    num_seeds: int = 5
    """Independent runs of each."""
    steps_factor: float = 1.0
    """Times as many environment steps as usual."""
    out: Path = Path("runs/gymnax_suite")
    """Folder for the results."""


def main(arguments: Arguments) -> None:
    summary = arguments.out / SUMMARY
    results = json.loads(summary.read_text()) if summary.exists() else {}
    environments = arguments.environments or tuple(name for name in ENVIRONMENTS if name not in results)
    plans = {environment: plans_of(environment, arguments.steps_factor) for environment in environments}
    for environment in environments:
        # What is to be found again has a place of its own.
        out = arguments.out / "runs" / environment if arguments.checkpoint_every else None
        study = Study(
            f"gymnax_suite_{environment}",
            plans[environment],
            dataclasses.replace(arguments, out=out),
            score=sampled_return(num_evaluation_episodes(plans[environment][0])),
        )
        study.run_all()
        results[environment] = result(study.runs)
        in_order = [name for name in ENVIRONMENTS if name in results]
        write_results({name: results[name] for name in dict.fromkeys(in_order + list(results))}, arguments.out)
    print((arguments.out / TABLE).read_text())
    print(f"Results in {arguments.out}: {TABLE}, {SUMMARY}, {CURVES}")


def num_evaluation_episodes(plan: Plan) -> int:
    """Some 25,000 steps of them: many of short ones, whose returns are often a matter of luck."""
    return min(256, max(16, 25_600 // plan.config.env.max_steps))


def plans_of(environment: str, steps_factor: float) -> list[Plan]:
    """PPO's run and GRPO's."""
    total_steps = int(steps_factor * STEPS.get(environment, 300_000))
    algorithms = {"PPO": "ppo", "GRPO": VARIANTS.get(environment, "grpo")}
    plans = {label: make_plan(environment, name, total_steps=total_steps) for label, name in algorithms.items()}
    return [plan._replace(label=label) for label, plan in plans.items()]


def result(runs: list[Run]) -> dict:
    """What summary.json says of an environment.

    The random policy's return is that of GRPO's first rollouts, whole episodes of a policy as it is initialised: all
    actions about equally likely, or Gaussian with a deviation of half the bounds' width.
    """
    of = {run.label: run for run in runs}
    return {
        "steps": int(of["PPO"].hyperparams.total_steps),
        "random": round_to(np.mean(of["GRPO"].returns[0])),
        "num_seeds": len(of["PPO"].final_returns),
        "hardware": hardware(),
        "runs": {label: result_of_run(run) for label, run in of.items()},
    }


def result_of_run(run: Run) -> dict:
    """Final returns, times and the curve, to four digits."""
    curve = learning_curve(run.result.steps, run.returns, run.counts, num_points=50)
    return {
        "algorithm": name_of(run.config.algorithm),
        "iqm": round_to(iqm(run.final_returns)),
        "ci95": [round_to(bound) for bound in bootstrap_interval(run.final_returns)],
        "per_seed": [round_to(final_return) for final_return in run.final_returns],
        "wall_seconds": round_to(run.wall_seconds),
        "core_seconds": round_to(run.core_seconds),
        "curve": {name: [round_to(value) for value in values] for name, values in curve._asdict().items()},
    }


def round_to(value: float) -> float:
    """Four significant digits."""
    return float(f"{value:.4g}")


def write_results(results: dict, out: Path) -> None:
    """All three files, from what the first one holds."""
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


def row(environment: str, entry: dict) -> list[str]:
    """The cells of one environment; a variant of GRPO is named."""

    def cell(run: dict) -> str:
        low, high = run["ci95"]
        variant = "" if run["algorithm"] in ("ppo", "grpo") else f" `{run['algorithm']}`"
        return f"{run['iqm']:.4g} [{low:.4g}, {high:.4g}]{variant}"

    ppo, grpo = entry["runs"]["PPO"], entry["runs"]["GRPO"]
    goal = ""
    if environment in GOALS:
        met = max(ppo["iqm"], grpo["iqm"]) >= GOALS[environment]
        goal = f"{GOALS[environment]:g}" + ("" if met else " (missed)")
    published = PUBLISHED.get(environment, "")
    cells = [f"{entry['steps']:,}", cell(ppo), cell(grpo), f"{entry['random']:.4g}", published, goal]
    return [environment, *cells, f"{ppo['core_seconds']:.0f} s"]


if __name__ == "__main__":
    command(lambda: main(tyro.cli(Arguments)))

"""PPO and GRPO on all of gymnax: `python -m experiments.gymnax_suite`."""

import dataclasses
import functools
from pathlib import Path
from typing import NamedTuple

from grpo_jax.commands.harness.command import command
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.runs.run_spec import RunSpec

from .harness.suite_study import SuiteArguments, make_plans, run_suite, score_cell


class Entry(NamedTuple):
    steps: int = 300_000  # environment steps of each seed
    goal: float | None = None  # the mean return that the best of them should reach
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

METHODS = ("PPO", "GRPO")
HEADER = ["steps", *METHODS, "random", "published", "goal", "PPO's core time"]


@dataclasses.dataclass
class Arguments(SuiteArguments):
    """Trains PPO and GRPO on gymnax's environments, and compares them."""

    out: Path = Path("runs/gymnax_suite")
    """Folder for the results."""


def main(arguments: Arguments) -> None:
    run_suite("gymnax_suite", arguments, list(SUITE), functools.partial(plans, arguments), HEADER, cells)


def plans(arguments: Arguments, environment: str) -> list[RunSpec]:
    entry = SUITE.get(environment, Entry())
    algorithms = zip(METHODS, ("ppo", entry.variant), strict=True)
    return make_plans(arguments, environment, dict(algorithms), entry.steps)


def cells(environment: str, result: dict) -> list[str]:
    entry = SUITE.get(environment, Entry())
    runs = [result["runs"].get(label) for label in METHODS]
    goal = ""
    if entry.goal is not None:
        best = max(run["iqm"] for run in runs if run is not None)
        goal = f"{entry.goal:g}" + ("" if best >= entry.goal else " (missed)")
    random = "" if result.get("random") is None else f"{result['random']:.4g}"
    core_time = "" if runs[0] is None else f"{runs[0]['core_seconds']:.0f} s"
    scores = [score_cell(run, usual=("ppo", "grpo")) for run in runs]
    return [f"{result['steps']:,}", *scores, random, entry.published, goal, core_time]


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

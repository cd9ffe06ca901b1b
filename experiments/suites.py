"""PPO on other suites than gymnax: `python -m experiments.suites`."""

import dataclasses
import functools
from pathlib import Path
from typing import NamedTuple

from grpo_jax import Hyperparams
from grpo_jax.commands.harness.command import command
from grpo_jax.commands.harness.limits import Seeds
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.runs.run_spec import RunSpec
from grpo_jax.runs.tuned_settings import tuned_settings

from .harness.suite_study import SuiteArguments, make_plans, run_suite, score_cell


class Entry(NamedTuple):
    """An environment of the comparison. Its smaller budget is the `total_steps` of its tuned settings."""

    full_steps: int | None = None  # environment steps of each seed in the published runs
    published: str = ""  # returns of PPO after the numbers of steps stated, with their source


BRAX = "https://github.com/google/brax/blob/main/notebooks/training.ipynb"
LE2333 = "https://github.com/le2333/RTRRL/blob/main/rtrrl/docs/parameter_evolution.md"
CRAFTAX = "https://github.com/MichaelTMatthews/Craftax"
NAVIX = "https://github.com/epignatelli/navix/tree/neurips/baselines/rejax"
ZOO = "https://github.com/DLR-RM/rl-baselines3-zoo/blob/master/benchmark.md"
REPPO = "https://github.com/cvoelcker/reppo/tree/main/results"

SUITE = {
    "brax:ant": Entry(50_000_000, f"100 at 1.5M, 480 at 4.4M, 5840 at 25M ([brax]({BRAX}))"),
    "brax:halfcheetah": Entry(50_000_000, f"4523 at 50M ([RTRRL]({LE2333}))"),
    "brax:hopper": Entry(50_000_000, f"487 at 1M, 846 at 2M ([RTRRL]({LE2333}))"),
    "brax:walker2d": Entry(50_000_000),
    "brax:humanoid": Entry(50_000_000),
    "brax:reacher": Entry(50_000_000),
    "craftax:Craftax-Classic-Symbolic-v1": Entry(1_000_000_000, f"19.8 at 1B ([Craftax]({CRAFTAX}))"),
    "craftax:Craftax-Symbolic-v1": Entry(1_000_000_000, f"4.97 at 1M, 26.9 at 1B ([Craftax]({CRAFTAX}))"),
    "pgx:2048": Entry(20_000_000),
    "navix:Navix-Empty-6x6-v0": Entry(1_000_000, f"1 at 262k ([Navix]({NAVIX}))"),
    "navix:Navix-Empty-Random-8x8-v0": Entry(1_000_000, f"0.57 at 262k, 0.93 at 524k, 1 at 786k ([Navix]({NAVIX}))"),
    "navix:Navix-DoorKey-5x5-v0": Entry(1_000_000),
    "navix:Navix-DoorKey-8x8-v0": Entry(1_000_000, f"0.77 at 262k, 0.89 at 524k, 0.96 at 1M ([Navix]({NAVIX}))"),
    "xland:MiniGrid-DoorKey-5x5": Entry(1_000_000, f"0.964 at 100k ([MiniGrid, SB3 zoo]({ZOO}))"),
    "xland:MiniGrid-EmptyRandom-5x5": Entry(1_000_000, f"0.968 at 100k ([MiniGrid, SB3 zoo]({ZOO}))"),
    "xland:MiniGrid-Unlock": Entry(1_000_000, f"0.963 at 100k ([MiniGrid, SB3 zoo]({ZOO}))"),
    "jumanji:Snake-v1": Entry(256_000_000),
    "jumanji:Game2048-v1": Entry(96_000_000),
    "playground:CartpoleBalance": Entry(60_000_000, f"263 untrained, 999 at 50M ([REPPO]({REPPO}))"),
    "playground:CheetahRun": Entry(60_000_000, f"3 untrained, 747 at 50M ([REPPO]({REPPO}))"),
}


@dataclasses.dataclass
class Arguments(SuiteArguments):
    """Trains PPO on environments of other suites than gymnax."""

    num_seeds: Seeds = 4
    """Independent runs of each."""
    full: bool = False
    """The environment steps of the published runs, for a GPU, instead of those that suit two cores of a CPU."""
    out: Path = Path("runs/suites")
    """Folder for the results."""


def main(arguments: Arguments) -> None:
    run_suite("suites", arguments, list(SUITE), functools.partial(plans, arguments), HEADER, cells)


def plans(arguments: Arguments, environment: str) -> list[RunSpec]:
    """The runs of PPO, over the published steps or those of its tuned settings."""
    entry = SUITE.get(environment, Entry())
    total_steps = tuned_settings(environment, "ppo").get("total_steps", Hyperparams().total_steps)
    if arguments.full and entry.full_steps is not None:
        total_steps = entry.full_steps
    return make_plans(arguments, environment, {"PPO": "ppo"}, total_steps)


HEADER = ["steps", "PPO", "published PPO", "PPO's steps/s", "PPO's core time"]


def cells(environment: str, result: dict) -> list[str]:
    ppo = result["runs"].get("PPO")
    published = SUITE[environment].published if environment in SUITE else ""
    times = ["", ""] if ppo is None else [f"{ppo['steps_per_second']:,.0f}", f"{ppo['core_seconds']:,.0f} s"]
    return [f"{result['steps']:,}", score_cell(ppo, usual=("ppo",)), published, *times]


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

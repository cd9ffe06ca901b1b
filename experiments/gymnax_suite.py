"""PPO and GRPO on every environment of gymnax: `python -m experiments.gymnax_suite`."""

import dataclasses

import jax
import numpy as np
import tyro
from rich.table import Table

from experiments.study import NUM_EVALUATION_EPISODES, Plan, Run, Study, StudyArguments, command, make_plan, plot_curves
from grpo_jax import evaluate, make_init
from grpo_jax.statistics import bootstrap_interval, iqm

RETURN_TO_GO = (
    "Pendulum-v1",
    "Reacher-misc",
    "Swimmer-misc",
    "PointRobot-misc",
    "UmbrellaChain-bsuite",
    "BernoulliBandit-misc",
    "GaussianBandit-misc",
    "MetaMaze-misc",
    "Pong-misc",
    "Asterix-MinAtar",
    "Breakout-MinAtar",
    "Freeway-MinAtar",
    "Seaquest-MinAtar",
    "SpaceInvaders-MinAtar",
)
"""Where many steps pay and most of a return is not a step's doing: GRPO compares returns-to-go there, else returns."""

STEPS = {
    "MountainCar-v0": 1_000_000,
    "MountainCarContinuous-v0": 1_000_000,
    "Acrobot-v1": 1_000_000,
    "MemoryChain-bsuite": 200_000,
    "SimpleBandit-bsuite": 100_000,
    "Seaquest-MinAtar": 200_000,
    "Asterix-MinAtar": 1_000_000,
    "Breakout-MinAtar": 1_000_000,
    "Freeway-MinAtar": 1_000_000,
    "SpaceInvaders-MinAtar": 1_000_000,
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
    "Breakout-MinAtar": "28 at 5M",
    "SpaceInvaders-MinAtar": "154 at 5M",
    "Asterix-MinAtar": "5.9 at 5M",
    "Freeway-MinAtar": "50 at 5M",
}
"""gymnax's own README (best of PPO and evolution strategies, https://github.com/RobertTLange/gymnax); of MinAtar
purejaxrl's PPO after 5 million steps, on gymnax 1.0.1."""

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
    """Trains PPO and GRPO on gymnax's environments with the settings of each, and compares them."""

    environments: tuple[str, ...] = ENVIRONMENTS
    """Names of gymnax environments."""
    num_seeds: int = 6
    """Independent runs of each."""
    steps_factor: float = 1.0
    """Times as many environment steps as usual."""


def main(arguments: Arguments) -> None:
    plans = []
    for environment in arguments.environments:
        total_steps = int(arguments.steps_factor * STEPS.get(environment, 300_000))
        for algorithm in ("ppo", "grpo_return_to_go" if environment in RETURN_TO_GO else "grpo"):
            label = "PPO" if algorithm == "ppo" else "GRPO"
            plans.append(make_plan(environment, algorithm, total_steps=total_steps)._replace(label=label))
    study = Study("gymnax_suite", plans, arguments)
    untrained = {plan.config.env.name: untrained_return(plan) for plan in plans if plan.label == "PPO"}
    study.run_all()
    plot_curves(study.runs, study.out / "learning_curves.png", "environment steps")
    rows = [row(environment, study.runs, untrained[environment]) for environment in arguments.environments]
    table = Table("environment", "steps", "untrained", "PPO", "GRPO", "published")
    for cells in rows:
        table.add_row(*cells)
    study.console.print(table)
    lines = ["| environment | steps | untrained | PPO | GRPO | published |", "|---|---|---|---|---|---|"]
    (study.out / "table.md").write_text("\n".join(lines + [f"| {' | '.join(cells)} |" for cells in rows]) + "\n")
    study.console.print(f"Results in {study.out}: table.md, summary.json, metrics.jsonl, learning_curves.png")


def untrained_return(plan: Plan) -> float:
    """Of a policy as it is initialised: all actions about equally likely, or Gaussian with a deviation of 1."""
    state = make_init(plan.config)(jax.random.key(0), plan.hyperparams)
    play = jax.jit(lambda state, key: evaluate(plan.config, state, key, num_episodes=NUM_EVALUATION_EPISODES).returns)
    return float(np.mean(play(state, jax.random.key(1))))


def row(environment: str, runs: list[Run], untrained: float) -> list[str]:
    """The cells of one environment; an asterisk marks GRPO with returns-to-go."""
    of_environment = {run.label: run for run in runs if run.environment == environment}

    def cell(label: str) -> str:
        returns = of_environment[label].final_returns
        low, high = bootstrap_interval(returns)
        mark = "*" if label == "GRPO" and environment in RETURN_TO_GO else ""
        return f"{iqm(returns):.4g}{mark} [{low:.4g}, {high:.4g}]"

    steps = f"{int(of_environment['PPO'].hyperparams.total_steps):,}"
    return [environment, steps, f"{untrained:.4g}", cell("PPO"), cell("GRPO"), PUBLISHED.get(environment, "")]


if __name__ == "__main__":
    command(lambda: main(tyro.cli(Arguments)))

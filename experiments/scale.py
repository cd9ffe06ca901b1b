"""Both ends of `--scale`, a CPU's and a GPU's, at equal environment steps: `python -m experiments.scale`."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

from grpo_jax import tuned
from grpo_jax.algorithms import by_name
from grpo_jax.commands.harness.command import command
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.commands.harness.scale import for_gpu
from grpo_jax.runs.run_spec import RunSpec
from grpo_jax.runs.tuned_settings import tuned_settings

from .harness.suite_study import SuiteArguments, run_suite, score_cell


class Entry(NamedTuple):
    algorithms: tuple[str, ...] = ("ppo",)
    steps: int = 1_000_000  # environment steps of each seed


SUITE = {
    "CartPole-v1": Entry(("ppo", "grpo")),
    "Acrobot-v1": Entry(("ppo", "grpo")),
    "Pendulum-v1": Entry(),
    "Breakout-MinAtar": Entry(),
    "Asterix-MinAtar": Entry(),
}


class Method(NamedTuple):
    """An algorithm at the CPU's end, or at the GPU's with changes of the rule."""

    algorithm: str = "ppo"
    on_gpu: bool = True
    given: dict[str, Any] = {}
    environments: int = 1  # times as many as the rule has


SHORT = {"num_steps": 16}
METHODS = {
    "PPO, cpu": Method(on_gpu=False),
    "PPO, 16 steps": Method(given=SHORT),
    "PPO, 16 steps, × 2": Method(given=SHORT, environments=2),
    "PPO, 4,096": Method(given={"num_envs": 4096}),
    "GRPO, cpu": Method("grpo", on_gpu=False),
    "GRPO, × 2": Method("grpo", environments=2),
}
HEADER = ["steps", *METHODS]


@dataclasses.dataclass
class Arguments(SuiteArguments):
    """Trains with the settings of a CPU and with those of a GPU, over the same environment steps."""

    out: Path = Path("runs/scale")
    """Folder for the results."""


def main(arguments: Arguments) -> None:
    run_suite("scale", arguments, list(SUITE), functools.partial(plans, arguments), HEADER, cells)


def plans(arguments: Arguments, environment: str) -> list[RunSpec]:
    """The runs of all methods on an environment; of those with equal settings only the first."""
    entry, planned = SUITE[environment], {}
    total_steps = int(arguments.steps_factor * entry.steps)
    for label, method in METHODS.items():
        if method.algorithm not in entry.algorithms:
            continue
        fields = fields_of(environment, method, total_steps)
        plan = RunSpec(label, *tuned(environment, method.algorithm, **fields), arguments.training_keys)
        planned.setdefault((plan.config, plan.hyperparams.learning_rate), plan)
    return list(planned.values())


def fields_of(environment: str, method: Method, total_steps: int) -> dict[str, Any]:
    """The settings of a method for that many environment steps."""
    settings = tuned_settings(environment, method.algorithm)
    if not method.on_gpu:
        return settings | {"total_steps": total_steps}
    given = method.given | {"total_steps": total_steps}
    if method.environments > 1:
        given["num_envs"] = method.environments * for_gpu(settings, by_name(method.algorithm), given)["num_envs"]
    return for_gpu(settings, by_name(method.algorithm), given)


def cells(environment: str, result: dict) -> list[str]:
    return [f"{result['steps']:,}", *(score_cell(result["runs"].get(each), ("ppo", "grpo")) for each in METHODS)]


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

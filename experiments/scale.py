"""Both ends of `--scale`, a CPU's and a GPU's, at equal environment steps: `python -m experiments.scale`.

With `--candidates` it tries other rules for the GPU's end, each with 4,096 environments; give it a --seed of its own.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

from grpo_jax import Config
from grpo_jax.algorithms import by_name, name_of
from grpo_jax.commands.harness.command import command
from grpo_jax.commands.harness.figures import write_markdown
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.commands.harness.scale import for_gpu
from grpo_jax.commands.harness.settings import make_plan, settings
from grpo_jax.recording.run_spec import RunSpec

from .compiled_programs.program_tables import per_step
from .harness.suite_study import SuiteArguments, run_suite, score_cell
from .harness.summaries import TABLE, read_results


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
PROGRAMS = Path(__file__).parent / "results" / "accelerators" / "gymnax"
"""Has the launches of PPO's programs on an H100."""
GRPO_LAUNCHES = 43
"""Of a gradient step of GRPO on CartPole, by docs/accelerators.md."""
SIZES = "sizes"
SIZES_HEADER = ["environment", "run", "environments × steps", "minibatches", "learning rate"]
SIZES_HEADER += ["gradient steps per million steps", "thousand launches per million steps"]


class Method(NamedTuple):
    """An algorithm at the CPU's end, or at the GPU's with changes of the rule."""

    algorithm: str = "ppo"
    on_gpu: bool = True
    given: dict[str, Any] = {}
    environments: int = 1  # times as many as the rule has
    minibatches: int = 1  # times as many
    power: float = 0.25  # of the learning rate in the size of a minibatch


SHORT = {"num_steps": 16}
WIDE = Method(given={"num_envs": 4096})
METHODS = {
    "PPO, cpu": Method(on_gpu=False),
    "PPO, 16 steps": Method(given=SHORT),
    "PPO, 16 steps, × 2": Method(given=SHORT, environments=2),
    "PPO, 4,096": WIDE,
    "GRPO, cpu": Method("grpo", on_gpu=False),
    "GRPO, × 2": Method("grpo", environments=2),
}
CANDIDATES = {
    "square root": WIDE._replace(power=0.5),
    "fourth root": WIDE,
    "same rate": WIDE._replace(power=0.0),
    "square root, 4 × minibatches": WIDE._replace(power=0.5, minibatches=4),
    "same rate, 4 × minibatches": WIDE._replace(power=0.0, minibatches=4),
    "16 steps, 2 × samples, 2 × minibatches": Method(given=SHORT, environments=2, minibatches=2),
}


@dataclasses.dataclass
class Arguments(SuiteArguments):
    """Trains with the settings of a CPU and with those of a GPU, over the same environment steps."""

    candidates: bool = False
    """Other rules for the GPU's end, instead of the library's."""
    out: Path = Path("runs/scale")
    """Folder for the results."""


def main(arguments: Arguments) -> None:
    functions = functools.partial(plans, arguments), header(arguments), functools.partial(cells, arguments)
    run_suite("scale", arguments, list(SUITE), *functions)
    write_sizes(arguments)


def plans(arguments: Arguments, environment: str) -> list[RunSpec]:
    """The runs of all methods on an environment; of those with equal settings only the first."""
    entry, planned = SUITE[environment], {}
    total_steps = int(arguments.steps_factor * entry.steps)
    methods = CANDIDATES if arguments.candidates else METHODS
    for label, method in methods.items():
        if method.algorithm not in entry.algorithms:
            continue
        fields = fields_of(environment, method, total_steps)
        plan = make_plan(environment, method.algorithm, arguments.training_keys, label=label, **fields)
        planned.setdefault((plan.config, plan.hyperparams.learning_rate), plan)
    return list(planned.values())


def fields_of(environment: str, method: Method, total_steps: int) -> dict[str, Any]:
    """The settings of a method for that many environment steps."""
    tuned = settings(environment, method.algorithm)
    if not method.on_gpu:
        return tuned | {"total_steps": total_steps}
    given = method.given | {"total_steps": total_steps}
    if method.environments > 1:
        given["num_envs"] = method.environments * for_gpu(tuned, by_name(method.algorithm), given)["num_envs"]
    if method.minibatches > 1:
        given["num_minibatches"] = method.minibatches * tuned.get("num_minibatches", Config.num_minibatches)
    return for_gpu(tuned, by_name(method.algorithm), given, power=method.power)


def header(arguments: Arguments) -> list[str]:
    return ["steps", *(CANDIDATES if arguments.candidates else METHODS)]


def cells(arguments: Arguments, environment: str, result: dict) -> list[str]:
    scores = (score_cell(result["runs"].get(label), usual=("ppo", "grpo")) for label in header(arguments)[1:])
    return [f"{result['steps']:,}", *scores]


def write_sizes(arguments: Arguments) -> None:
    """Writes sizes/table.md: the iterations of each run, and what a GPU would launch in a million environment steps."""
    rows, programs = [], read_results(PROGRAMS)
    for environment in SUITE:
        program = programs[environment]["programs"][-1]
        step, gradient = (per_step(program, "launches_by_phase", phase) for phase in ("rollout", "gradient"))
        for plan in plans(arguments, environment):
            config, rate = plan.config, plan.hyperparams.learning_rate
            iterations = 1e6 / config.steps_per_iteration
            gradient_steps = iterations * config.num_epochs * config.num_minibatches
            of_gradient = GRPO_LAUNCHES if name_of(config.algorithm) == "grpo" else gradient
            launches = iterations * config.num_steps * step + gradient_steps * of_gradient
            size = f"{config.num_envs:,} × {config.num_steps}"
            numbers = f"{gradient_steps:,.0f}", f"{launches / 1000:,.0f}"
            rows.append([environment, plan.label, size, str(config.num_minibatches), f"{rate:g}", *numbers])
    (arguments.out / SIZES).mkdir(exist_ok=True)
    write_markdown(arguments.out / SIZES / TABLE, SIZES_HEADER, rows)


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

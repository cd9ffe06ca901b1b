"""GRPO beside PPO, the same budget of environment steps: `python -m experiments.grpo_vs_ppo`."""

import dataclasses

from grpo_jax import tuned
from grpo_jax.commands.harness.command import command
from grpo_jax.commands.harness.limits import Steps
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.commands.harness.study import CommandStudy, StudyArguments
from grpo_jax.runs.run_spec import RunSpec


@dataclasses.dataclass
class Arguments(StudyArguments):
    """Trains GRPO and PPO on each environment, all seeds of a run in one program, and compares them."""

    environments: tuple[str, ...] = ("CartPole-v1",)
    """Names of gymnax environments."""
    total_steps: Steps = 500_000
    """Environment steps a seed may take."""


def main(arguments: Arguments) -> None:
    plans = [
        RunSpec(name.upper(), *tuned(environment, name, total_steps=arguments.total_steps), arguments.training_keys)
        for environment in arguments.environments
        for name in ("grpo", "ppo")
    ]
    study = CommandStudy("grpo_vs_ppo", plans, arguments)
    study.run_all()
    study.finish()


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

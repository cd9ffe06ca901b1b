"""Any algorithm on any environment: `grpo-jax train --environment CartPole-v1 --algorithm grpo`."""

import dataclasses
import sys
from pathlib import Path

import jax
import numpy as np

from grpo_jax.algorithms import name_of
from grpo_jax.commands.harness.command import command
from grpo_jax.commands.harness.flags import RunFlags, parse
from grpo_jax.commands.harness.limits import Seeds
from grpo_jax.commands.harness.study import CommandStudy, StudyArguments
from grpo_jax.recording.trained_policy import load
from grpo_jax.runs.run_spec import RunSpec


@dataclasses.dataclass(kw_only=True)
class Arguments(StudyArguments, RunFlags):
    """Trains one algorithm on one environment, all seeds in one program."""

    num_seeds: Seeds = 1
    """Independent runs."""
    init_from: Path | None = None
    """Folder of another run's results: all seeds start from its policy, that of the seed with the highest score."""


def main(arguments: Arguments) -> None:
    config = arguments.config
    plan = RunSpec(name_of(config.algorithm), config, arguments.hyperparams, arguments.training_keys)
    start = {}
    if arguments.init_from is not None:
        policy = load(arguments.init_from, config=config)  # by the run's config: nothing that it names is imported
        policies = jax.tree.map(lambda leaf: np.stack([leaf] * arguments.num_seeds), policy)
        start = {"params": lambda: policies.params, "normalizer": policies.normalizer}
    study = CommandStudy("train", [plan], arguments)
    if config.networks_by is not None:
        study.console.print(f"networks: {config.networks_by}", soft_wrap=True)
    if arguments.init_from is not None:
        study.about = {"init_from": f"row {policy.row} of {policy.name} in {arguments.init_from.resolve()}"}
        study.console.print(f"All seeds start from {study.about['init_from']}, whose score is {policy.score:.4g}")
    study.run_all(lambda plan: start)
    study.finish()


if __name__ == "__main__":
    command(lambda: main(parse(Arguments, sys.argv[1:])))

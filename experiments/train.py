"""Any algorithm on any environment: `python -m experiments.train --environment CartPole-v1 --algorithm grpo`."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import tyro

from experiments.settings import CONFIGS, HYPERPARAMS
from experiments.study import Study, command
from grpo_jax import Config, Hyperparams
from grpo_jax.algorithms import Algorithm, name_of
from grpo_jax.environments.render import check_renderable, render
from grpo_jax.evaluation import record_episode


@dataclasses.dataclass
class Arguments:
    """Trains one algorithm on one environment, all seeds in one program."""

    config: tyro.conf.OmitArgPrefixes[Config]
    hyperparams: tyro.conf.OmitArgPrefixes[Hyperparams]
    num_seeds: int = 1
    """Independent runs."""
    seed: int = 0
    """Of everything random."""
    out: Path | None = None
    """Folder for the results; a new one under runs/ if left out."""
    render: Path | None = None
    """Draws an episode of the first seed's trained policy into this file, such as out.gif."""


# On a command line, an environment and an algorithm are names.
NAMES = tyro.constructors.ConstructorRegistry()


@NAMES.primitive_rule
def _by_name(type_info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
    if type_info.type not in (str | Algorithm, str | Any):
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="NAME",
        instance_from_str=lambda strings: strings[0],
        is_instance=lambda value: True,
        str_from_instance=lambda value: [str(value)],
    )


def with_settings(flags: list[str]) -> list[str]:
    """The flags, and before them those of the algorithm's tuned settings: of two, the later one holds."""
    chosen = [flags[i + 1] for i, flag in enumerate(flags[:-1]) if flag == "--algorithm"] or [Config.algorithm]
    name = chosen[-1].lower().replace("-", "_")
    settings = CONFIGS.get(name, CONFIGS["grpo"]) | HYPERPARAMS.get(name, {})
    return [part for field, value in settings.items() for part in (f"--{field.replace('_', '-')}", str(value))] + flags


def main(arguments: Arguments) -> None:
    if arguments.render is not None:
        check_renderable(arguments.config.env.name)
    study = Study("train", arguments.out, seed=arguments.seed, num_seeds=arguments.num_seeds)
    config = arguments.config
    _, states = study.run(name_of(config.algorithm), config, arguments.hyperparams)
    study.finish()
    if arguments.render is not None:
        first = jax.tree.map(lambda leaf: leaf[0], states)
        episode = record_episode(config, first, jax.random.key(arguments.seed))
        render(config.environment, dict(config.env_params), episode.states, episode.rewards, arguments.render)
        study.console.print(f"An episode of seed 0 is drawn in {arguments.render}", highlight=False)


if __name__ == "__main__":
    command(lambda: main(tyro.cli(Arguments, args=with_settings(sys.argv[1:]), registry=NAMES)))

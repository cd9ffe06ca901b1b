"""PPO and methods without a critic on MinAtar: `python -m experiments.minatar`.

All methods take the same environment steps and updates with the same network.
"""

import dataclasses
from typing import Any, NamedTuple

from grpo_jax import tuned
from grpo_jax.commands.harness.command import command
from grpo_jax.commands.harness.limits import Seeds, Steps
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.commands.harness.study import CommandStudy, StudyArguments
from grpo_jax.runs.run_spec import RunSpec
from grpo_jax.sweeps.runs import sampled_return

from .harness.summaries import chosen

GAMES = ("Breakout", "SpaceInvaders", "Asterix", "Freeway")


class Method(NamedTuple):
    """An algorithm, and its changes to the settings of the game."""

    algorithm: str
    fields: dict[str, Any] = {}


METHODS = {
    "PPO": Method("ppo", {"gae_lambda": 0.95}),  # purejaxrl's lambda, on all games
    "PPO, one network": Method(
        "ppo", {"shared_critic": True, "gae_lambda": 0.8, "learning_rate": 2.5e-3, "entropy_coef": 0.02}
    ),
    "kernel + GAE": Method("kernel_gae"),
    "same step": Method("same_step_gae"),
}


@dataclasses.dataclass
class Arguments(StudyArguments):
    """Trains PPO and critic-free methods on MinAtar at equal environment steps."""

    games: tuple[str, ...] = GAMES
    """Names of the games."""
    total_steps: Steps = 5_000_000
    """Environment steps a seed may take."""
    num_seeds: Seeds = 5
    """Independent runs of each."""
    methods: tuple[str, ...] = ()
    """Names of the methods; all if left out."""


def main(arguments: Arguments) -> None:
    methods = chosen(METHODS, arguments.methods, "method")
    plans = [
        RunSpec(
            label,
            *tuned(f"{game}-MinAtar", method.algorithm, total_steps=arguments.total_steps, **method.fields),
            arguments.training_keys,
        )
        for game in arguments.games
        for label, method in methods.items()
    ]
    study = CommandStudy("minatar", plans, arguments, score=sampled_return(64))
    study.run_all()
    study.finish()


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

"""Draws episodes of a trained policy: `grpo-jax play runs/mine --out episode.gif`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import jax

from grpo_jax.commands.harness.command import command, make_console
from grpo_jax.commands.harness.limits import Between, OutFile
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.commands.harness.trained import Drawing, EpisodeArguments


@dataclasses.dataclass
class Arguments(EpisodeArguments):
    """Draws episodes of a trained policy, and prints their returns and lengths."""

    row: int | None = None
    """Row of the policy in the run, such as its seed's number; by default the best one."""
    out: OutFile = Path("episode.gif")
    """File to write, .gif."""
    num_episodes: Annotated[int, Between(1, 64, "a whole number from 1 to 64")] = 1
    """Episodes, drawn side by side."""
    fps: Annotated[float, Between(0.01, 1000.0, "a number from 0.01 to 1000")] | None = None
    """Frames per second; by default as suits the environment."""


def main(arguments: Arguments) -> None:
    policy, key = arguments.load(arguments.row), jax.random.key(arguments.seed)
    drawing = Drawing(policy.config, arguments.out, arguments.fps)
    played = drawing.draw(jax.jit(policy.state)(key), key, num_episodes=arguments.num_episodes, greedy=arguments.greedy)
    console = make_console()
    for episode, (value, length) in enumerate(zip(played.returns, played.lengths, strict=True)):
        console.print(f"episode {episode}: return {value:.6g}, {length} steps")
    console.print(f"Drawn in {arguments.out}", soft_wrap=True)


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

"""Draws episodes of a trained policy: `python -m experiments.play runs/mine --out episode.gif`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro

from grpo_jax import load
from grpo_jax.errors import ConfigError

from .harness.command import command, make_console
from .harness.drawing import Drawing
from .harness.flags import parse_override
from .harness.parsing import parse_flags


@dataclasses.dataclass
class Arguments:
    """Draws episodes of a trained policy, and prints their returns and lengths."""

    folder: Annotated[Path, tyro.conf.Positional]
    """Folder of results of a training command."""
    run: str | None = None
    """Name of the run, if the folder holds several."""
    which: Literal["final", "best"] = "final"
    """The policy at the end of training, or the one with the highest training return."""
    out: Path = Path("episode.gif")
    """File to write: .gif, .mp4, or .png for a sheet of frames."""
    num_episodes: int = 1
    """Episodes, drawn side by side."""
    greedy: bool = False
    """Take the most probable actions instead of samples."""
    seed: int = 0
    """Seed of the resets, the environment and the actions."""
    fps: float | None = None
    """Frames per second; by default as suits the environment."""
    env_params: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[NAME=VALUE ...]")] = ()
    """Parameters of the environment that differ from those in training."""


def main(arguments: Arguments) -> None:
    if arguments.num_episodes < 1:
        raise ConfigError(f"--num-episodes {arguments.num_episodes} is not a positive integer")
    if arguments.fps is not None and not arguments.fps > 0:
        raise ConfigError(f"--fps {arguments.fps} is not a positive number")
    policy = load(arguments.folder, arguments.run, which=arguments.which)
    if arguments.env_params:
        policy = policy.on(env_params=dict(map(parse_override, arguments.env_params)))
    drawing = Drawing(policy.config, arguments.out, arguments.fps)
    played = drawing.draw(
        policy, jax.random.key(arguments.seed), num_episodes=arguments.num_episodes, greedy=arguments.greedy
    )
    console = make_console()
    for episode, (value, length) in enumerate(zip(played.returns, played.lengths, strict=True)):
        console.print(f"episode {episode}: return {value:.6g}, {length} steps")
    console.print(f"Drawn in {arguments.out}", soft_wrap=True)


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

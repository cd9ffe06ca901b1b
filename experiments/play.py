"""Draws episodes of a trained policy: `python -m experiments.play runs/mine --out episode.gif`."""

import dataclasses
from pathlib import Path

import jax

from grpo_jax.errors import ConfigError, as_count

from .harness.command import command, make_console
from .harness.drawing import Drawing
from .harness.parsing import parse_flags
from .harness.trained import EpisodeArguments


@dataclasses.dataclass
class Arguments(EpisodeArguments):
    """Draws episodes of a trained policy, and prints their returns and lengths."""

    row: int | None = None
    """Row of the policy in the run, such as its seed's number; by default the best one."""
    out: Path = Path("episode.gif")
    """File to write: .gif, .mp4, or .png for a sheet of frames."""
    num_episodes: int = 1
    """Episodes, drawn side by side."""
    fps: float | None = None
    """Frames per second; by default as suits the environment."""


def main(arguments: Arguments) -> None:
    num_episodes = as_count("--num-episodes", arguments.num_episodes)
    if arguments.fps is not None and not arguments.fps > 0:
        raise ConfigError(f"--fps {arguments.fps} is not a positive number")
    policy, key = arguments.load(arguments.row), jax.random.key(arguments.seed)
    drawing = Drawing(policy.config, arguments.out, arguments.fps)
    played = drawing.draw(jax.jit(policy.state)(key), key, num_episodes=num_episodes, greedy=arguments.greedy)
    console = make_console()
    for episode, (value, length) in enumerate(zip(played.returns, played.lengths, strict=True)):
        console.print(f"episode {episode}: return {value:.6g}, {length} steps")
    console.print(f"Drawn in {arguments.out}", soft_wrap=True)


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

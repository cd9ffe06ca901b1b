"""Draws episodes of a trained policy: `grpo-jax play runs/mine --out episode.gif`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import jax
import numpy as np

from grpo_jax.commands.harness.command import command, make_console
from grpo_jax.commands.harness.limits import Between, OutFile
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.commands.harness.trained import EpisodeArguments
from grpo_jax.errors import ConfigError
from grpo_jax.evaluation.episodes import Steps, record_episodes
from grpo_jax.rendering import Renderer, make_renderer, write_animation
from grpo_jax.rendering.drawings import captioned


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
    if arguments.out.suffix.lower() != ".gif":
        raise ConfigError(f"{arguments.out} is not a name for an animation; use one that ends in .gif")
    policy, key = arguments.load(arguments.row), jax.random.key(arguments.seed)
    config, state = policy.config, jax.jit(policy.state)(key)
    renderer = make_renderer(config.environment, dict(config.env_params))
    chunks = record_episodes(config, state, key, num_episodes=arguments.num_episodes, greedy=arguments.greedy)
    last: list[Steps] = []

    def pictures():
        for steps in chunks:
            last[:] = [steps]
            yield captioned_frames(renderer, steps)

    write_animation(pictures(), arguments.out, renderer.fps if arguments.fps is None else arguments.fps)
    console = make_console()
    for episode, (value, length) in enumerate(zip(last[0].returns[-1], last[0].lengths[-1], strict=True)):
        console.print(f"episode {episode}: return {value:.6g}, {length} steps")
    console.print(f"Drawn in {arguments.out}", soft_wrap=True)


def captioned_frames(renderer: Renderer, steps: Steps) -> np.ndarray:
    """`[N, B, H, W, 3]`, with the episode, the number of steps and the return in a line above each picture."""
    frames = renderer.frames(steps.states, steps.observations)
    shape = frames.shape[:2]

    def text(i, episode):
        words = f"step {steps.lengths[i, episode]}   return {steps.returns[i, episode]:.5g}"
        return f"episode {episode}   {words}" if shape[1] > 1 else words

    pictures = [captioned(frames[place], text(*place)) for place in np.ndindex(shape)]
    return np.stack(pictures).reshape(*shape, *pictures[0].shape)


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

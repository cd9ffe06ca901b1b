"""What the commands that use trained policies share: their flags, and episodes as a picture that moves."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import jax
import numpy as np
import tyro

from grpo_jax import Config, TrainedPolicy, TrainState, load
from grpo_jax.commands.harness.flags import parse_overrides
from grpo_jax.commands.harness.limits import Seed
from grpo_jax.errors import ConfigError
from grpo_jax.evaluation.episodes import Evaluation, Steps, record_episodes
from grpo_jax.rendering import make_renderer, write_animation
from grpo_jax.rendering.drawings import captioned


@dataclasses.dataclass
class PolicyArguments:
    """The flags that choose trained policies."""

    folder: Annotated[Path, tyro.conf.Positional]
    """Folder of results of a command that trains."""
    run: str | None = None
    """Name of the run, if the folder holds several."""
    which: Literal["final", "best"] = "final"
    """Policies at the end of training, or those with the highest score during it."""
    trust: bool = False
    """Import code that the folder names, such as a custom environment; only if you trust who made the folder."""

    def load(self, row: int | Literal["best", "all"] | None) -> TrainedPolicy:
        """The policy of this row, of all, or, for None, of the best row."""
        return load(self.folder, self.run, which=self.which, row="best" if row is None else row, trust=self.trust)


@dataclasses.dataclass
class EpisodeArguments(PolicyArguments):
    """The flags of commands that play episodes."""

    greedy: bool = False
    """Take the most probable actions instead of samples."""
    environment: str | None = None
    """Play in another environment with the same observations and actions."""
    env_params: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[NAME=VALUE ...]")] = ()
    """Parameters of the environment to override, such as max_steps_in_episode=1000."""
    seed: Seed = 0
    """Seed of the episodes: resets, environment and actions."""

    def load(self, row: int | Literal["best", "all"] | None) -> TrainedPolicy:
        """As in `PolicyArguments`, in the environment of the flags."""
        overrides = parse_overrides(self.env_params)
        policy = super().load(row)
        return policy.on(self.environment, overrides) if self.environment is not None or overrides else policy


class Drawing:
    """A file with episodes of an environment, side by side, .gif.

    Raises ConfigError if the environment or the format cannot be drawn. Without `fps`, as suits the environment.
    """

    def __init__(self, config: Config, path: Path, fps: float | None = None):
        if path.suffix.lower() != ".gif":
            raise ConfigError(f"{path} is not a name for an animation; use one that ends in .gif")
        self._config, self._path = config, path
        self._renderer = make_renderer(config.environment, dict(config.env_params))
        self._fps = self._renderer.fps if fps is None else fps

    def draw(self, state: TrainState, key: jax.Array, *, num_episodes: int = 1, greedy: bool = False) -> Evaluation:
        """Plays episodes with the policy and the environment parameters of a state, and writes the file."""
        last = None

        def frames():
            nonlocal last
            for steps in record_episodes(self._config, state, key, num_episodes=num_episodes, greedy=greedy):
                last = steps
                yield self._frames(steps)

        write_animation(frames(), self._path, self._fps)
        return Evaluation(returns=last.returns[-1], lengths=last.lengths[-1])

    def _frames(self, steps: Steps) -> np.ndarray:
        """`[N, B, H, W, 3]`, with the episode, the number of steps and the return in a line above each picture."""
        frames = self._renderer.frames(steps.states, steps.observations)
        shape = frames.shape[:2]

        def text(i, episode):
            words = f"step {steps.lengths[i, episode]}   return {steps.returns[i, episode]:.5g}"
            return f"episode {episode}   {words}" if shape[1] > 1 else words

        pictures = [captioned(frames[place], text(*place)) for place in np.ndindex(shape)]
        return np.stack(pictures).reshape(*shape, *pictures[0].shape)

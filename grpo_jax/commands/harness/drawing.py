"""Episodes of a policy as a picture that moves."""

from pathlib import Path

import jax
import numpy as np

from grpo_jax import Config, TrainState
from grpo_jax.evaluation.episodes import Evaluation, Steps, record_episodes
from grpo_jax.rendering import make_renderer
from grpo_jax.rendering.animation import captioned, check_animation_path, write_animation


class Drawing:
    """A file with episodes of an environment, side by side: .gif, .mp4, or .png for a sheet of frames.

    Raises ConfigError if the environment or the format cannot be drawn. Without `fps`, as suits the environment.
    """

    def __init__(self, config: Config, path: Path, fps: float | None = None):
        check_animation_path(path)
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
        captions = [
            [
                (f"episode {index}   " if len(row[0]) > 1 else "") + f"step {length}   return {value:.5g}"
                for index, (length, value) in enumerate(zip(*row, strict=True))
            ]
            for row in zip(steps.lengths, steps.returns, strict=True)
        ]
        return captioned(frames, captions)

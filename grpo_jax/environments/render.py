"""Draws episodes with gymnax's visualiser."""

import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.environments.gymnax_adapter import overridden_params
from grpo_jax.environments.registry import environment_object
from grpo_jax.errors import ConfigError, nearest

CLASSIC_CONTROL = {"Acrobot-v1", "CartPole-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0"}
"""Environments for which gymnax needs gymnasium and pygame."""

RENDERABLE = CLASSIC_CONTROL | {
    "Asterix-MinAtar",
    "Breakout-MinAtar",
    "Catch-bsuite",
    "FourRooms-misc",
    "Freeway-MinAtar",
    "MetaMaze-misc",
    "PointRobot-misc",
    "Pong-misc",
    "Seaquest-MinAtar",
    "SpaceInvaders-MinAtar",
}
"""Environments that gymnax can draw."""

VIDEOS = (".mp4", ".mov", ".mkv", ".avi")
"""Formats that need ffmpeg; .gif does not."""


def check_renderable(name: str, path: Path) -> None:
    """Raises ConfigError if the environment or the file format cannot be drawn on this machine."""
    suffix = path.suffix.lower()
    if suffix not in (".gif", *VIDEOS):
        raise ConfigError(f"{path} has no format for animations: use a name such as episode.gif")
    if suffix in VIDEOS and shutil.which("ffmpeg") is None:
        raise ConfigError(f"drawing {path} needs ffmpeg, which is not installed; use {path.with_suffix('.gif')}")
    if name not in RENDERABLE:
        raise ConfigError(f"gymnax cannot draw {name!r}; {nearest(name, RENDERABLE)}")
    if name in CLASSIC_CONTROL and importlib.util.find_spec("pygame") is None:
        raise ConfigError(f"drawing {name!r} needs pygame: pip install 'grpo-jax[render]' (or '.[render]')")


def render(environment: str | Any, params: Mapping[str, float], states: list, rewards: np.ndarray, path: Path) -> None:
    """Animates the states of one episode into `path`, such as "out.gif".

    Args:
      environment, params: as for `make_environment`.
      states: states of the environment, one for each frame.
      rewards: `[len(states)]`; the title shows their running sum, the return.
      path: file to write; its suffix chooses the format.

    Raises:
      ConfigError: if gymnax cannot draw this environment or write this format.
    """
    import matplotlib

    env = environment_object(environment)
    env_params = overridden_params(env, params)
    check_renderable(env.name, path)
    # Let pygame draw off-screen, without a display or a sound card.
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    matplotlib.use("Agg")
    from gymnax.visualize import Visualizer

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Visualizer(env, env_params, states, np.cumsum(rewards)).animate(str(path))

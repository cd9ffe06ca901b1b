"""Drawing episodes, through gymnax's own visualiser."""

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
"""Environments that gymnax draws with gymnasium and pygame."""

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
"""What ffmpeg makes; a .gif needs no program."""


def check_renderable(name: str, path: Path) -> None:
    """Raises ConfigError if an environment of this name, or a file of this one's suffix, cannot be drawn here."""
    suffix = path.suffix.lower()
    if suffix not in (".gif", *VIDEOS):
        raise ConfigError(f"{path} is no file that an episode can be drawn in: use one such as episode.gif")
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
      states: of the environment, one for each frame.
      rewards: `[len(states)]`, whose running sum is the title's return.
      path: of the picture; its suffix chooses the format.

    Raises:
      ConfigError: if gymnax cannot draw this environment, or not into such a file.
    """
    import matplotlib

    env = environment_object(environment)
    env_params = overridden_params(env, params)
    check_renderable(env.name, path)
    # pygame draws into memory: it needs neither a screen nor a sound card.
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    matplotlib.use("Agg")
    from gymnax.visualize import Visualizer

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Visualizer(env, env_params, states, np.cumsum(rewards)).animate(str(path))

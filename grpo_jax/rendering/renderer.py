"""Finds how an environment is drawn."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.environments.environment import Environment
from grpo_jax.environments.interface import env_name, overridden_params
from grpo_jax.environments.registry import environment_object, make_environment
from grpo_jax.environments.suites import Craftax
from grpo_jax.environments.suites.physics import RigidBodies
from grpo_jax.environments.tokens import Task
from grpo_jax.errors import ConfigError
from grpo_jax.rendering import images, shapes, suites

DRAWINGS = {
    "CartPole-v1": (shapes.cart_pole, 50),
    "Pendulum-v1": (shapes.pendulum, 20),
    "Acrobot-v1": (shapes.acrobot, 15),
    "MountainCar-v0": (shapes.mountain_car, 30),
    "MountainCarContinuous-v0": (shapes.mountain_car, 30),
    "Reacher-misc": (shapes.reacher, 20),
    "Swimmer-misc": (shapes.swimmer, 20),
    "FrozenLake-misc": (shapes.frozen_lake, 5),
}
"""Drawings of gymnax's environments, and frames per second."""


class Renderer(NamedTuple):
    """How an environment is drawn, on the host."""

    # (states, observations), NumPy arrays, each leaf [N, ...] -> frames [N, H, W, 3] uint8
    draw: Callable[[Any, Any], np.ndarray]
    fps: float  # frames per second at which it looks natural

    def frames(self, states: Any, observations: Any) -> np.ndarray:
        """Frames `[N, B, H, W, 3]` uint8 of `N` steps of `B` episodes; the leaves are `[N, B, ...]`."""
        shape = jax.tree.leaves(states)[0].shape[:2]
        frames = self.draw(*jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), (states, observations)))
        return frames.reshape(*shape, *frames.shape[1:])


def make_renderer(environment: str | Any, params: Mapping[str, Any] | None = None) -> Renderer:
    """The renderer of an environment.

    An environment's own method `render(state, params) -> [H, W, 3]` uint8 comes first. It gets one state, of NumPy
    arrays, and may use any library. Without one, an environment is drawn that observes an image `[h, w]` or
    `[h, w, c]`.

    Args:
      environment, params: as for `make_environment`.

    Raises:
      ConfigError: if there is no drawing of the environment, or a package for it is missing.
    """
    env = environment_object(environment)
    if isinstance(env, Task):
        raise ConfigError("a token task has no picture; grpo_jax.evaluation.answers shows its prompts and completions")
    if not isinstance(env, Environment):
        if isinstance(env, RigidBodies):
            return Renderer(one_by_one(suites.rigid_bodies_drawing(env)), 1 / env.dt)
        env_params = overridden_params(env, params or {})
        if isinstance(env, Craftax):
            return Renderer(suites.craftax_drawing(env), 10)
        if (drawing := _drawing(env)) is not None:
            render, fps = drawing
            return Renderer(one_by_one(lambda state: render(state, env_params)), fps)
    observation = make_environment(environment, params).observation
    if isinstance(observation, jax.ShapeDtypeStruct) and images.is_image(observation.shape):
        return Renderer(lambda states, observations: images.draw_observations(observations), 15)
    if _is_gymnax(render := getattr(env, "render", None)):
        return Renderer(one_by_one(suites.gymnax_drawing(render, env_params)), 10)
    raise ConfigError(
        f"there is no drawing of {environment!r}; give the environment a method render(state, params) -> [H, W, 3] "
        "uint8, or choose one that observes an image, of brax, MuJoCo Playground or Craftax, or among "
        f"{', '.join(DRAWINGS)}, FourRooms-misc, MetaMaze-misc, PointRobot-misc"
    )


def one_by_one(draw: Callable[[Any], np.ndarray]) -> Callable[[Any, Any], np.ndarray]:
    """`Renderer.draw` of a function from one state to one frame."""

    def draw_all(states, observations):
        leaves, structure = jax.tree.flatten(states)
        return np.stack([draw(structure.unflatten(leaf[i] for leaf in leaves)) for i in range(len(leaves[0]))])

    return draw_all


def _drawing(env: Any) -> tuple[Callable, float] | None:
    """The environment's own drawing or that for its name, `(state, params) -> frame`, and frames per second."""
    render = getattr(env, "render", None)
    if render is not None and not _is_gymnax(render):
        return render, 30
    if env_name(env) not in DRAWINGS:
        return None
    draw, fps = DRAWINGS[env_name(env)]
    return lambda state, params: draw(env, state, params), fps


def _is_gymnax(render: Callable | None) -> bool:
    """Whether the method is one of gymnax, which returns a figure of matplotlib."""
    return getattr(render, "__module__", "").startswith("gymnax.")

"""Finds how an environment is drawn: by itself, its suite or gymnax, by a drawing here, or from its observations."""

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.environments.environment import Environment
from grpo_jax.environments.interface import env_name, overridden_params
from grpo_jax.environments.registry import environment_object, make_environment
from grpo_jax.environments.suites import Craftax
from grpo_jax.environments.suites.physics import RigidBodies
from grpo_jax.environments.tokens import Task
from grpo_jax.errors import ConfigError
from grpo_jax.rendering.drawings import DRAWINGS, draw_observations, enlarge, is_image


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
    arrays, and may use any library. An environment without a drawing shows its observations: an image `[h, w]` or
    `[h, w, c]`, or else a heat map of the numbers.

    Args:
      environment, params: as for `make_environment`.

    Raises:
      ConfigError: if there is no drawing of the environment, or a package for it is missing.
    """
    env = environment_object(environment)
    if isinstance(env, Task):
        raise ConfigError("a token task has no picture; grpo_jax.answer gives its prompts and completions")
    if not isinstance(env, Environment):
        if isinstance(env, RigidBodies):
            return Renderer(_one_by_one(rigid_bodies_drawing(env)), 1 / env.dt)
        if isinstance(env, Craftax):
            return Renderer(_craftax_drawing(env), 10)
        env_params, render = overridden_params(env, params or {}), getattr(env, "render", None)
        if render is not None and not _is_gymnax(render):
            return Renderer(_one_by_one(lambda state: render(state, env_params)), 30)
        if (name := env_name(env)) in DRAWINGS:
            draw, fps = DRAWINGS[name]
            return Renderer(_one_by_one(lambda state: draw(state, env_params)), fps)
    observation = make_environment(environment, params).observation
    shape = getattr(observation, "shape", ())
    if _is_gymnax(render := getattr(env, "render", None)) and not is_image(shape):
        return Renderer(_one_by_one(lambda state: _draw_figure(*render(state, env_params))), 10)
    if shape:
        return Renderer(lambda states, observations: draw_observations(observations), 15)
    raise ConfigError(
        f"there is no drawing of {environment!r}, and it observes no array; give the environment a method "
        "render(state, params) -> [H, W, 3] uint8"
    )


def _is_gymnax(render: Callable | None) -> bool:
    """Whether the method is one of gymnax, which returns a figure of matplotlib."""
    return getattr(render, "__module__", "").startswith("gymnax.")


def _one_by_one(draw: Callable[[Any], np.ndarray]) -> Callable[[Any, Any], np.ndarray]:
    """`Renderer.draw` of a function from one state to one frame."""

    def draw_all(states, observations):
        leaves, structure = jax.tree.flatten(states)
        return np.stack([draw(structure.unflatten(leaf[i] for leaf in leaves)) for i in range(len(leaves[0]))])

    return draw_all


def _draw_figure(figure: Any, axes: Any) -> np.ndarray:
    """A frame of a figure of matplotlib, as gymnax makes them."""
    figure.set_dpi(50)  # 320 by 240 pixels
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())[..., :3].copy()
    sys.modules["matplotlib.pyplot"].close(figure)  # which otherwise keeps it
    return pixels


def _craftax_drawing(env: Craftax) -> Callable[[Any, np.ndarray], np.ndarray]:
    """Craftax's own renderer, 16 pixels a block, at twice its size: `Renderer.draw`."""
    if "Classic" in env.name:
        from craftax.craftax_classic.renderer import make_craftax_pixel_renderer
    else:
        from craftax.craftax.renderer import make_craftax_pixel_renderer
    draw = jax.jit(jax.vmap(make_craftax_pixel_renderer(16)))
    return lambda states, observations: enlarge(np.asarray(jnp.clip(draw(states), 0, 255).astype(jnp.uint8)), 420)


def rigid_bodies_drawing(env: RigidBodies) -> Callable[[Any], np.ndarray]:
    """MuJoCo's renderer, with a camera that follows the first body: a function from one state to one frame.

    Raises:
      ConfigError: if there is no OpenGL.
    """
    import mujoco

    model, data, camera = env.mj_model, mujoco.MjData(env.mj_model), mujoco.MjvCamera()
    try:
        if sys.platform == "linux" and not (os.environ.get("MUJOCO_GL") or os.environ.get("DISPLAY")):
            from mujoco import egl

            mujoco.gl_context.GLContext = egl.GLContext  # MuJoCo's own choice needs a display
        renderer = mujoco.Renderer(model, height=300, width=400)
    except Exception as error:  # each library has its own errors
        raise ConfigError(
            f"drawing the bodies of MuJoCo needs OpenGL, which failed ({error}); without a display, install "
            "libegl1 or libosmesa6 and set the environment variable MUJOCO_GL=egl or MUJOCO_GL=osmesa"
        ) from error
    for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
        renderer.scene.flags[flag] = False  # on a CPU they take most of the time
    mujoco.mj_forward(model, data)
    solid = model.geom_type != mujoco.mjtGeom.mjGEOM_PLANE
    distances = np.linalg.norm(data.geom_xpos - data.xpos[1], axis=-1) + model.geom_rbound
    camera.type, camera.trackbodyid, camera.distance = (
        mujoco.mjtCamera.mjCAMERA_TRACKING,
        1,
        2.5 * distances[solid].max(),
    )
    camera.azimuth, camera.elevation = 110, -20

    def draw(state):
        data.qpos[:], data.qvel[:] = env.joints(state)
        mujoco.mj_forward(model, data)
        renderer.update_scene(data, camera)
        return renderer.render()

    return draw

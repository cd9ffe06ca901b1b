"""Finds how an environment is drawn: by itself or its suite, by a drawing here, or from its observations."""

import importlib
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
from grpo_jax.rendering.drawings import DRAWINGS, draw_observation, enlarge


class Renderer(NamedTuple):
    """How an environment is drawn, on the host."""

    draw: Callable[[Any, Any], np.ndarray]  # (state, observation), NumPy arrays -> [H, W, 3] uint8
    fps: float  # frames per second at which it looks natural

    def frames(self, states: Any, observations: Any) -> np.ndarray:
        """Frames `[N, B, H, W, 3]` uint8 of `N` steps of `B` episodes; the leaves are `[N, B, ...]`."""
        shape = jax.tree.leaves(states)[0].shape[:2]
        steps = (jax.tree.map(lambda leaf, i=i: leaf[i], (states, observations)) for i in np.ndindex(shape))
        frames = np.stack([self.draw(*step) for step in steps])
        return frames.reshape(*shape, *frames.shape[1:])


def make_renderer(environment: str | Any, params: Mapping[str, Any] | None = None) -> Renderer:
    """The renderer of an environment, which is given as to `make_environment`.

    An environment's own method `render(state, params) -> [H, W, 3]` uint8 comes first. It gets one state, of NumPy
    arrays, and may use any library. An environment without a drawing shows its observations: an image `[h, w]` or
    `[h, w, c]`, or else a heat map of the numbers. Raises ConfigError where there is nothing to draw.
    """
    env = environment_object(environment)
    if isinstance(env, Task):
        raise ConfigError("a token task has no picture; grpo_jax.answer gives its prompts and completions")
    if isinstance(env, RigidBodies):
        return Renderer(_rigid_bodies_drawing(env), 1 / env.dt)
    if isinstance(env, Craftax):
        return Renderer(_craftax_drawing(env), 10)
    render = getattr(env, "render", None)
    is_gymnax = getattr(render, "__module__", "").startswith("gymnax.")  # it returns a figure of matplotlib
    if not isinstance(env, Environment):
        env_params, name = overridden_params(env, params or {}), env_name(env)
        if render is not None and not is_gymnax:
            return Renderer(lambda state, observation: render(state, env_params), 30)
        if name in DRAWINGS:
            drawing, fps = DRAWINGS[name]
            return Renderer(lambda state, observation: drawing(state, env_params), fps)
    made = make_environment(environment, params)
    if getattr(made.observation, "shape", ()):
        return Renderer(lambda state, observation: draw_observation(observation), 15)
    instead = "give the environment a method render(state, params) -> [H, W, 3] uint8"
    if made.on_host:
        instead = "an environment on the host can be drawn only if its observation is one array"
    raise ConfigError(f"there is no drawing of {environment!r}, and it observes no single array; {instead}")


def _craftax_drawing(env: Craftax) -> Callable[[Any, Any], np.ndarray]:
    """Craftax's own renderer, 16 pixels a block, at twice its size: `Renderer.draw`."""
    kind = "craftax_classic" if "Classic" in env.name else "craftax"
    draw = jax.jit(importlib.import_module(f"craftax.{kind}.renderer").make_craftax_pixel_renderer(16))
    return lambda state, observation: enlarge(np.asarray(jnp.clip(draw(state), 0, 255).astype(jnp.uint8)), 420)


def _rigid_bodies_drawing(env: RigidBodies) -> Callable[[Any, Any], np.ndarray]:
    """MuJoCo's renderer, with a camera that follows the first body: `Renderer.draw`. ConfigError without OpenGL."""
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
    camera.type, camera.trackbodyid = mujoco.mjtCamera.mjCAMERA_TRACKING, 1
    camera.distance, camera.azimuth, camera.elevation = 2.5 * distances[solid].max(), 110, -20

    def draw(state, observation):
        data.qpos[:], data.qvel[:] = env.joints(state)
        mujoco.mj_forward(model, data)
        renderer.update_scene(data, camera)
        return renderer.render()

    return draw

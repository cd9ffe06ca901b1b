"""Renderers that suites bring with them."""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.environments.suites import Craftax
from grpo_jax.environments.suites.physics import RigidBodies
from grpo_jax.errors import ConfigError
from grpo_jax.rendering.images import enlarge

SIZE = 400, 300
"""Width and height of MuJoCo's pictures."""


def gymnax_drawing(render: Callable, params: Any) -> Callable[[Any], np.ndarray]:
    """One frame of a state by a `render(state, params)` of gymnax, which makes a figure of matplotlib."""

    def draw(state):
        figure, _ = render(state, params)
        figure.set_dpi(50)  # 320 by 240 pixels
        figure.canvas.draw()
        pixels = np.asarray(figure.canvas.buffer_rgba())[..., :3].copy()
        sys.modules["matplotlib.pyplot"].close(figure)  # which otherwise keeps it
        return pixels

    return draw


def craftax_drawing(env: Craftax) -> Callable[[Any, np.ndarray], np.ndarray]:
    """Craftax's own renderer, 16 pixels a block, at twice its size: `Renderer.draw`."""
    if "Classic" in env.name:
        from craftax.craftax_classic.renderer import make_craftax_pixel_renderer
    else:
        from craftax.craftax.renderer import make_craftax_pixel_renderer
    draw = jax.jit(jax.vmap(make_craftax_pixel_renderer(16)))

    def draw_all(states, observations):
        return enlarge(np.asarray(jnp.clip(draw(states), 0, 255).astype(jnp.uint8)), size=420)

    return draw_all


def rigid_bodies_drawing(env: RigidBodies) -> Callable[[Any], np.ndarray]:
    """MuJoCo's renderer, with a camera that follows the first body: a function from one state to one frame.

    Raises:
      ConfigError: if there is no OpenGL.
    """
    import mujoco

    context, model = _opengl(), env.mj_model
    context.make_current()
    scene = mujoco.MjvScene(model, maxgeom=1000)
    for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
        scene.flags[flag] = False  # on a CPU they take most of the time
    target = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
    mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, target)
    data, options, view = mujoco.MjData(model), mujoco.MjvOption(), mujoco.MjrRect(0, 0, *SIZE)
    camera = mujoco.MjvCamera()
    camera.type, camera.trackbodyid = mujoco.mjtCamera.mjCAMERA_TRACKING, 1
    camera.azimuth, camera.elevation = 110, -20
    mujoco.mj_forward(model, data)
    solid = model.geom_type != mujoco.mjtGeom.mjGEOM_PLANE
    distances = np.linalg.norm(data.geom_xpos - data.xpos[1], axis=-1) + model.geom_rbound
    camera.distance = 2.5 * distances[solid].max()

    def draw(state):
        context.make_current()
        data.qpos[:], data.qvel[:] = env.joints(state)
        mujoco.mj_forward(model, data)
        mujoco.mjv_updateScene(model, data, options, None, camera, mujoco.mjtCatBit.mjCAT_ALL, scene)
        mujoco.mjr_render(view, scene, target)
        pixels = np.empty((*SIZE[::-1], 3), np.uint8)
        mujoco.mjr_readPixels(pixels, None, view, target)
        return pixels[::-1]

    return draw


@functools.cache
def _opengl() -> Any:
    """The context of OpenGL: MuJoCo's choice, but EGL where nothing is chosen and there is no display.

    All drawings share it: a `MjrContext` that is deleted frees what belongs to the current context.
    """
    import mujoco

    try:
        if sys.platform == "linux" and not (os.environ.get("MUJOCO_GL") or os.environ.get("DISPLAY")):
            from mujoco.egl import GLContext
        else:
            GLContext = mujoco.GLContext
        return GLContext(*SIZE)
    except Exception as error:  # each library has its own errors
        raise ConfigError(
            f"drawing the bodies of MuJoCo needs OpenGL, which failed ({error}); without a display, install "
            "libegl1 or libosmesa6 and set the environment variable MUJOCO_GL=egl or MUJOCO_GL=osmesa"
        ) from error

"""Drawings of the environments of other suites."""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from grpo_jax.environments.suites import Craftax
from grpo_jax.environments.suites.physics import RigidBodies
from grpo_jax.errors import ConfigError
from grpo_jax.rendering.grids import enlarge

SIZE = 400, 300
"""Width and height of MuJoCo's pictures."""


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


def draw_2048(state: Any) -> np.ndarray:
    """The tiles of pgx's 2048, `[H, W, 3]` uint8."""
    side, tile = 60, 52
    image = Image.new("RGB", (4 * side, 4 * side), "#bbada0")
    for place, exponent in enumerate(state.inner._board.tolist()):
        corner = (place % 4 * side + 4, place // 4 * side + 4)
        image.paste(_tile(exponent, tile), corner)
    return np.asarray(image)


@functools.cache
def _tile(exponent: int, size: int) -> Image.Image:
    """A tile with the number `2 ** exponent`, or an empty one."""
    warm = min(exponent / 8, 1.0)
    color = tuple(round(a + (b - a) * warm) for a, b in zip((238, 228, 218), (237, 80, 40), strict=True))
    image = Image.new("RGB", (size, size), color if exponent else "#cdc1b4")
    if exponent:
        number = str(2**exponent)
        font = ImageFont.load_default(26 if len(number) < 3 else 20 if len(number) < 4 else 16)
        color = "#776e65" if exponent < 4 else "#ffffff"
        ImageDraw.Draw(image).text((size / 2, size / 2), number, fill=color, font=font, anchor="mm")
    return image

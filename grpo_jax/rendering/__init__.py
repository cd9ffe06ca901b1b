"""Pictures of environments: `make_renderer` finds how one is drawn, `write_animation` writes frames to a file."""

from grpo_jax.rendering.drawings import write_animation
from grpo_jax.rendering.renderer import Renderer, make_renderer

__all__ = ["Renderer", "make_renderer", "write_animation"]

"""Pictures of environments: `make_renderer` finds how one is drawn."""

from grpo_jax.environments.rendering.renderer import Renderer, make_renderer

__all__ = ["Renderer", "make_renderer"]

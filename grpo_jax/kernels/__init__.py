"""Small dense networks as kernels of a Hopper GPU, in Pallas Mosaic GPU, which JAX has in this form since 0.11.

| file | what |
|---|---|
| `networks.py` | `dense_networks`, the differentiable function; `unserved`, what it cannot compute |
| `layout.py` | how samples, weights and gradients lie in the kernels' memory |
| `tiles.py` | what both kernels share: their grid, loads, products, activations |
| `forward.py`, `backward.py` | the kernels |
"""

from grpo_jax.kernels.networks import dense_networks, unserved

__all__ = ["dense_networks", "unserved"]

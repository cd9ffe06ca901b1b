"""Small dense networks as kernels of a Hopper GPU, Pallas Mosaic GPU; nothing else knows how they work.

| file | what |
|---|---|
| `networks.py` | `dense_networks`, the differentiable function, and `unserved`, what it cannot do |
"""

from grpo_jax.kernels.networks import dense_networks, unserved

__all__ = ["dense_networks", "unserved"]

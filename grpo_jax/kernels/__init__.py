"""Small dense networks as kernels of a Hopper GPU, in Pallas Mosaic GPU, which JAX has in this form since 0.11."""

from grpo_jax.kernels.networks import dense_networks, unserved

__all__ = ["dense_networks", "unserved"]

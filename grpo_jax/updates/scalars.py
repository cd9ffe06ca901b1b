"""Metrics as one array, which an accelerator writes at once."""

import jax
import jax.numpy as jnp
from flax import struct

from grpo_jax.types import Metrics


@struct.dataclass
class Scalars:
    """Numbers by name, in one array: an accelerator writes them at once."""

    values: jax.Array  # [..., M] float
    names: tuple[str, ...] = struct.field(pytree_node=False)

    @classmethod
    def stack(cls, scalars: Metrics) -> "Scalars":
        """One array of these scalars."""
        return cls(jnp.stack([value.astype(float) for value in scalars.values()]), tuple(scalars))

    def as_dict(self) -> Metrics:
        """Each array `[...]` by its name."""
        return dict(zip(self.names, jnp.moveaxis(self.values, -1, 0), strict=True))

"""Steps of two of MinAtar's games written for vectors: gymnax's bits from the same keys, in fewer kernels.

gymnax moves the entities of a game one after the other, with a scatter each, and looks for a free place in a loop whose
length depends on the state. On a GPU each scatter is a launch of its own, and such a loop waits for the host. Here all
entities are compared at once: no loops, no sorts, no scatters but two in Seaquest. `tests/environments/test_lean.py`
plays both side by side, and counts these operations.

Actions are those of the space: others, which gymnax clamps or wraps, may have other effects.

`Config("Asterix-MinAtar")` takes the lean step; gymnax's own is `Config(gymnax.make("Asterix-MinAtar")[0])`.
"""

import jax
import jax.numpy as jnp

LEAN = {"Asterix-MinAtar": "asterix", "Seaquest-MinAtar": "seaquest"}
"""The module here that has the class `Lean` for a name of gymnax."""


# --- JAX's random numbers from fewer kernels: without arrays of keys, which are stored in between ---------------------


def child(key: jax.Array, i: int, n: int) -> jax.Array:
    """`jax.random.split(key, n)[i]`."""
    return jax.random.fold_in(key, i) if _splits_by_folding(key) else jax.random.split(key, n)[i]


def randint(key: jax.Array, shape: tuple[int, ...], n: int) -> jax.Array:
    """`jax.random.randint(key, shape, 0, n)`."""
    if jax.config.jax_enable_x64 or not _splits_by_folding(key):  # with 64 bits it draws others
        return jax.random.randint(key, shape, 0, n)
    high, low = (jax.random.bits(child(key, i, 2), shape, jnp.uint32) % n for i in range(2))
    return ((high * (2**32 % n) + low) % n).astype(jnp.int32)


def _splits_by_folding(key: jax.Array) -> bool:
    """Whether JAX splits such a key by folding in numbers: by default it does."""
    return jax.config.jax_threefry_partitionable and str(jax.random.key_impl(key)) in ("threefry2x32", "rbg")

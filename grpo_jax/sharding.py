"""How the rows of a run, seeds and hyperparameters, are laid over the devices."""

from collections.abc import Callable

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec

from grpo_jax.types import PyTree


def over_rows(function: Callable[[PyTree], PyTree], num_rows: int) -> Callable[[PyTree], PyTree]:
    """The function of one row, made one of `num_rows` rows, which are split evenly over as many devices as divide them.

    On each device an accelerator takes its rows all at once (`vmap`); a CPU takes one after the other (`lax.map`), so
    that what a row works on stays in the cache, and a row that has nothing more to do costs nothing.
    """
    on_cpu = jax.default_backend() == "cpu"

    def rows(states):
        return jax.lax.map(function, states) if on_cpu else jax.vmap(function)(states)

    num_devices = max(n for n in range(1, len(jax.local_devices()) + 1) if num_rows % n == 0)
    if num_devices == 1:
        return rows
    mesh = Mesh(jax.local_devices()[:num_devices], ("rows",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("rows")
    return jax.shard_map(rows, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)

"""How the rows of a run (seeds × hyperparameters), and the environments of each, are laid over devices and hosts.

A mesh has an axis `"seeds"` for the rows, and may have an axis `"envs"` for the environments of each row. Rows know
nothing of each other. Environments do (groups, minibatches, running statistics): there XLA's partitioner keeps the
meaning of the program and puts in the communication, and what is here only says which arrays to split.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from grpo_jax.errors import ConfigError
from grpo_jax.types import PyTree, TrainState

ROWS, ENVS = "seeds", "envs"


def make_mesh(*, seeds: int | None = None, envs: int = 1) -> Mesh:
    """The devices of all processes as `seeds` × `envs`; without an axis of environments if `envs` is 1.

    Args:
      seeds: devices along the rows; by default all that there are, over `envs`.
      envs: devices along the environments of each row.

    Raises:
      ConfigError: there are not as many devices, or several processes and more devices than that.
    """
    num_devices, alone = jax.device_count(), jax.process_count() == 1
    seeds = num_devices // max(envs, 1) if seeds is None else seeds
    fits = seeds * envs <= num_devices if alone else seeds * envs == num_devices
    if min(seeds, envs) < 1 or not fits:
        raise ConfigError(
            f"a mesh of seeds={seeds} × envs={envs} does not fit {num_devices} devices of {jax.process_count()} "
            f"process(es); use sizes whose product is {num_devices} (JAX_NUM_CPU_DEVICES=8 makes 8 of a CPU)"
        )
    shape = {ROWS: seeds} | ({ENVS: envs} if envs > 1 else {})
    return jax.make_mesh(
        tuple(shape.values()),
        tuple(shape),
        devices=jax.devices()[: seeds * envs] if alone else None,
        axis_types=(AxisType.Auto,) * len(shape),
    )


def mesh_of_rows(num_rows: int) -> Mesh:
    """Every device on the rows, or as many as there are rows; the devices of several processes all take part."""
    return make_mesh(seeds=min(num_rows, jax.device_count()) if jax.process_count() == 1 else None)


def pad_rows(rows: PyTree, mesh: Mesh) -> PyTree:
    """The rows, each leaf `[R, ...]`, and the last one again until the mesh divides their number."""
    num_rows = jax.tree.leaves(rows)[0].shape[0]
    missing = -num_rows % mesh.shape[ROWS]
    if not missing:
        return rows
    return jax.tree.map(lambda leaf: jnp.concatenate([leaf, jnp.repeat(leaf[-1:], missing, axis=0)]), rows)


def over_rows(function: Callable[[PyTree], PyTree], mesh: Mesh) -> Callable[[PyTree], PyTree]:
    """The function of one row, made one of any number of rows (each leaf `[R, ...]`), split over the mesh.

    On each device an accelerator takes its rows all at once (`vmap`); a CPU takes one after the other (`lax.map`), so
    that what a row works on stays in the cache, and a row that has nothing more to do costs nothing. Where the mesh
    does not divide `R`, some devices compute a row more, in vain.
    """
    on_cpu = mesh.devices.flat[0].platform == "cpu"

    def of_device(rows):
        return jax.lax.map(function, rows) if on_cpu else jax.vmap(function)(rows)

    if mesh.size == 1:
        return of_device
    # Along the environments the partitioner works, inside what each device of the seeds axis runs by itself.
    spec = PartitionSpec(ROWS)
    sharded = jax.shard_map(of_device, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={ROWS}, check_vma=False)

    def of_all(rows):
        num_rows = jax.tree.leaves(rows)[0].shape[0]
        out = sharded(pad_rows(rows, mesh))
        return out if num_rows % mesh.shape[ROWS] == 0 else jax.tree.map(lambda leaf: leaf[:num_rows], out)

    return of_all


def state_shardings(mesh: Mesh) -> TrainState:
    """Where the parts of a row of states go, as a prefix of its tree: environments along both axes, the rest by row."""
    by_row = NamedSharding(mesh, PartitionSpec(ROWS))
    return TrainState(**dict.fromkeys(TrainState.__dataclass_fields__, by_row)).replace(
        rollout=NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
    )


def lay_out(states: TrainState, mesh: Mesh) -> TrainState:
    """A copy of rows of states that come from elsewhere, padded to what the mesh divides, over its devices.

    In several processes each has them all.
    """
    states, layout = pad_rows(states, mesh), state_shardings(mesh)
    if jax.process_count() == 1:
        return jax.device_put(jax.tree.map(jnp.copy, states), layout)
    # There device_put compares what the processes have, and would find that NaN is not NaN.
    return jax.jit(lambda states: jax.tree.map(jnp.copy, states), out_shardings=layout)(states)


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole of an array on every device, hence readable by every process."""
    return NamedSharding(mesh, PartitionSpec())


def along_envs(tree: PyTree, axis: int) -> PyTree:
    """The same values, with this axis of each leaf split over the devices of the environments, if there are such.

    The mesh is that of the surrounding `over_rows` or `jax.set_mesh`.
    """
    return _constrained(tree, PartitionSpec(*(None,) * axis, ENVS))


def on_every_device(tree: PyTree) -> PyTree:
    """The same values, whole on each device of the environments, if there are such: gathered here, and not later."""
    return _constrained(tree, PartitionSpec())


def _constrained(tree: PyTree, spec: PartitionSpec) -> PyTree:
    if ENVS not in jax.sharding.get_abstract_mesh().axis_names:
        return tree
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, spec), tree)

"""Meshes: how the rows of a run (seeds × hyperparameters) and their environments are split over devices and hosts.

A mesh has an axis `"seeds"` for the rows. It may also have an axis `"envs"` for the environments of each row, and an
axis `"model"` for the weights of each policy. Rows are independent of each other. Environments are not (they share
groups, minibatches and normaliser statistics), nor are the weights of a policy: this module says which arrays are
sharded, and XLA's partitioner adds the communication.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from grpo_jax.errors import ConfigError
from grpo_jax.host_calls import finished
from grpo_jax.types import PyTree, TrainState

ROWS, ENVS, MODEL = "seeds", "envs", "model"

_SPLIT_BY_INPUT = ("down", "out")  # layers of a transformer whose inputs are the sharded outputs of another layer


def make_mesh(
    *, seeds: int | None = None, envs: int = 1, model: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh `seeds` × `envs` × `model` of the devices of all processes; it omits `envs` or `model` of size 1.

    Args:
      seeds: devices along the rows; by default the number of devices divided by `envs` and `model`.
      envs: devices along the environments of each row.
      model: devices along the weights of each policy, for a policy too large for one device.
      devices: optional; instead of the devices of all processes.

    Raises:
      ConfigError: if there are too few devices, or the devices of several processes are not all used.
    """
    one_process = devices is not None or jax.process_count() == 1
    devices = jax.devices() if devices is None else devices
    num_devices = len(devices)
    seeds = num_devices // max(envs * model, 1) if seeds is None else seeds
    size = seeds * envs * model
    if min(seeds, envs, model) < 1 or size > num_devices or not (one_process or size == num_devices):
        raise ConfigError(
            f"a mesh of seeds={seeds} × envs={envs} × model={model} does not fit {num_devices} devices of "
            f"{jax.process_count()} process(es); use sizes whose product is {num_devices} (JAX_NUM_CPU_DEVICES=8 "
            "splits a CPU into 8 devices)"
        )
    shape = {ROWS: seeds} | {axis: size for axis, size in ((ENVS, envs), (MODEL, model)) if size > 1}
    return jax.make_mesh(
        tuple(shape.values()),
        tuple(shape),
        devices=devices[:size] if one_process else None,
        axis_types=(AxisType.Auto,) * len(shape),
    )


def make_row_mesh(num_rows: int) -> Mesh:
    """A mesh that splits rows over all devices. A single process uses at most one device for each row."""
    return make_mesh(seeds=min(num_rows, jax.device_count()) if jax.process_count() == 1 else None)


def pad_rows(rows: PyTree, mesh: Mesh) -> PyTree:
    """Repeats the last row until the mesh divides the number of rows; each leaf is `[R, ...]`."""
    num_rows = jax.tree.leaves(rows)[0].shape[0]
    missing = -num_rows % mesh.shape[ROWS]
    return _with_copies_of_the_last(rows, missing) if missing else rows


@functools.partial(jax.jit, static_argnums=1)
def _with_copies_of_the_last(rows: PyTree, number: int) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.concatenate([leaf, jnp.repeat(leaf[-1:], number, axis=0)]), rows)


def over_rows(function: Callable[[PyTree], PyTree], mesh: Mesh) -> Callable[[PyTree], PyTree]:
    """Maps a function of one row over any number of rows (each leaf `[R, ...]`), split over the mesh.

    An accelerator computes all its rows at once (`vmap`). A CPU computes one row after another (`lax.map`): the data of
    a row then stays in the cache, and a finished row costs nothing. If the mesh does not divide `R`, rows are padded.

    Results are bitwise reproducible for the same number of devices and of rows on each. For other numbers XLA fuses
    other operations, and results agree to rounding.
    """
    on_cpu = mesh.devices.flat[0].platform == "cpu"

    def on_one_device(rows):
        if jax.tree.leaves(rows)[0].shape[0] == 1:  # no loop; `vmap` would compute both branches of a `cond`
            return jax.tree.map(lambda leaf: leaf[None], function(jax.tree.map(lambda leaf: leaf[0], rows)))
        if on_cpu:
            return jax.lax.map(function, rows)
        return jax.vmap(function)(rows)

    if mesh.size == 1:
        return on_one_device
    if mesh.shape[ROWS] == 1:
        # The partitioner splits all axes: a `shard_map` over some of them could not call the host.
        def on_the_mesh(rows):
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return on_one_device(rows)

        return on_the_mesh
    # Only the seeds axis is mapped by hand; the partitioner splits the other axes inside the mapped function.
    spec = PartitionSpec(ROWS)
    sharded = jax.shard_map(on_one_device, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={ROWS}, check_vma=False)

    def on_all_devices(rows):
        num_rows = jax.tree.leaves(rows)[0].shape[0]
        results = sharded(pad_rows(rows, mesh))
        return results if num_rows % mesh.shape[ROWS] == 0 else jax.tree.map(lambda leaf: leaf[:num_rows], results)

    return on_all_devices


def make_rows_function(function: Callable, mesh: Mesh) -> Callable[..., Any]:
    """`rows_function(*rows) -> results` in NumPy: maps a function of one row's arguments over rows, on the mesh.

    Each leaf is `[R, ...]`. Rows are padded as the mesh needs; all but the last argument may be padded already.
    """
    mapped = over_rows(lambda row: function(*row), mesh)
    program = jax.jit(lambda *rows: mapped(tuple(pad_rows(x, mesh) for x in rows)), out_shardings=replicated(mesh))

    def rows_function(*rows):
        num_rows = len(jax.tree.leaves(rows[-1])[0])
        results = finished(program, *rows, num_devices=mesh.size)
        return jax.tree.map(lambda leaf: np.asarray(leaf)[:num_rows], results)

    return rows_function


def state_shardings(mesh: Mesh, states: TrainState) -> TrainState:
    """The shardings of rows of train states (or of their shapes), as a prefix of their tree.

    Rollout states are sharded by row and environment; weights and their optimiser moments by row and by the outputs or
    inputs of a layer, if the mesh divides these; everything else by row.
    """
    by_row = NamedSharding(mesh, PartitionSpec(ROWS))
    layout = TrainState(**dict.fromkeys(TrainState.__dataclass_fields__, by_row))
    if ENVS in mesh.shape:
        layout = layout.replace(rollout=NamedSharding(mesh, PartitionSpec(ROWS, ENVS)))
    if MODEL not in mesh.shape:
        return layout

    def weight_sharding(path, leaf):
        name = jax.tree_util.keystr(path)
        by_input = any(f"'{layer}'" in name for layer in _SPLIT_BY_INPUT)
        if f"'{'lora_b' if by_input else 'lora_a'}'" in name:  # the axis would be an adapter's rank
            return by_row
        axis = leaf.ndim - 2 if by_input else leaf.ndim - 1
        if leaf.ndim < 3 or leaf.shape[axis] % mesh.shape[MODEL]:
            return by_row
        return NamedSharding(mesh, PartitionSpec(ROWS, *(None,) * (axis - 1), MODEL))

    weights = {name: getattr(states, name) for name in ("params", "reference_params", "opt_state")}
    return layout.replace(**jax.tree_util.tree_map_with_path(weight_sharding, weights))


def shard_states(states: TrainState, mesh: Mesh) -> TrainState:
    """Pads rows of states to a number that the mesh divides, and copies them to its devices. Every process has all."""
    states = pad_rows(states, mesh)
    layout = state_shardings(mesh, states)
    if jax.process_count() == 1:
        return jax.device_put(jax.tree.map(jnp.copy, states), layout)
    # With several processes device_put checks that their values are equal, which fails for NaN.
    return jax.jit(lambda states: jax.tree.map(jnp.copy, states), out_shardings=layout)(states)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of a replicated array, which every process can read."""
    return NamedSharding(mesh, PartitionSpec())


def along_envs(tree: PyTree, axis: int) -> PyTree:
    """Shards this axis of each leaf over the devices of the environments.

    Like the functions below, it asks for the mesh of the surrounding `over_rows` or `jax.set_mesh`.
    """
    return _constrained(tree, PartitionSpec(*(None,) * axis, ENVS))


def on_every_device(tree: PyTree) -> PyTree:
    """Replicates each leaf over the devices of the environments: they communicate here, not later."""
    return _constrained(tree, PartitionSpec())


def on_own_environments(function: Callable, axis: int) -> Callable:
    """`function(params, x) -> y`, by each device for its own environments; every leaf of x and y has them along `axis`.

    It is for what the partitioner would not split: a kernel, or all samples as one flat batch. Gradients of the
    parameters are summed over the devices, which must divide the number of environments.
    """
    if not envs_are_split():
        return function
    spec = PartitionSpec(*(None,) * axis, ENVS)
    return jax.shard_map(function, in_specs=(PartitionSpec(), spec), out_specs=spec, axis_names={ENVS}, check_vma=False)


def envs_are_split() -> bool:
    """Whether the environments of a row are sharded, and not yet each device's own."""
    mesh = jax.sharding.get_abstract_mesh()
    return ENVS in mesh.axis_names and ENVS not in mesh.manual_axes


def num_env_devices() -> int:
    """Over how many devices the environments of a row are sharded."""
    return jax.sharding.get_abstract_mesh().shape[ENVS] if envs_are_split() else 1


def _constrained(tree: PyTree, spec: PartitionSpec) -> PyTree:
    if not envs_are_split():
        return tree
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, spec), tree)

"""How the rows of a run (seeds × hyperparameters), and the environments of each, are laid over devices and hosts.

A mesh has an axis `"seeds"` for the rows, and may have an axis `"envs"` for the environments of each row, and one,
`"model"`, for the weights of each policy. Rows know nothing of each other. Environments do (groups, minibatches,
running statistics), and so do the parts of a policy: there XLA's partitioner keeps the meaning of the program and puts
in the communication, and what is here only says which arrays to split.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from grpo_jax.errors import ConfigError
from grpo_jax.types import PyTree, TrainState

ROWS, ENVS, MODEL = "seeds", "envs", "model"

_TAKE_PARTS = ("down", "out")  # layers of a transformer whose inputs are the split outputs of the layer before


def make_mesh(*, seeds: int | None = None, envs: int = 1, model: int = 1) -> Mesh:
    """The devices of all processes as `seeds` × `envs` × `model`; without the axes of size 1 but the first.

    Args:
      seeds: devices along the rows; by default all that there are, over `envs` and `model`.
      envs: devices along the environments of each row.
      model: devices along the weights of each policy, for one that is too large for a device.

    Raises:
      ConfigError: there are not as many devices, or several processes and more devices than that.
    """
    num_devices, alone = jax.device_count(), jax.process_count() == 1
    seeds = num_devices // max(envs * model, 1) if seeds is None else seeds
    size = seeds * envs * model
    if min(seeds, envs, model) < 1 or not (size <= num_devices if alone else size == num_devices):
        raise ConfigError(
            f"a mesh of seeds={seeds} × envs={envs} × model={model} does not fit {num_devices} devices of "
            f"{jax.process_count()} process(es); use sizes whose product is {num_devices} (JAX_NUM_CPU_DEVICES=8 makes "
            "8 of a CPU)"
        )
    shape = {ROWS: seeds} | {axis: size for axis, size in ((ENVS, envs), (MODEL, model)) if size > 1}
    return jax.make_mesh(
        tuple(shape.values()),
        tuple(shape),
        devices=jax.devices()[:size] if alone else None,
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

    With as many devices, and rows on each, a row has the same bits again. Otherwise XLA makes another program of it
    (alone or in a loop, partitioned or not), with other operations fused and hence rounded together.
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


def state_shardings(mesh: Mesh, states: TrainState) -> TrainState:
    """Where the parts of rows of states, or of their shapes, go, as a prefix of their tree.

    Environments go along the rows and the environments; weights, with their moments, along the rows and the model, the
    outputs of a layer split or the inputs, where the mesh divides them; the rest by row.
    """
    by_row = NamedSharding(mesh, PartitionSpec(ROWS))
    layout = TrainState(**dict.fromkeys(TrainState.__dataclass_fields__, by_row))
    if ENVS in mesh.shape:
        layout = layout.replace(rollout=NamedSharding(mesh, PartitionSpec(ROWS, ENVS)))
    if MODEL not in mesh.shape:
        return layout

    def of_weights(path, leaf):
        inputs = any(f"'{name}'" in jax.tree_util.keystr(path) for name in _TAKE_PARTS)
        axis = leaf.ndim - 2 if inputs else leaf.ndim - 1
        if leaf.ndim < 3 or leaf.shape[axis] % mesh.shape[MODEL]:
            return by_row
        return NamedSharding(mesh, PartitionSpec(ROWS, *(None,) * (axis - 1), MODEL))

    weights = {name: getattr(states, name) for name in ("params", "reference_params", "optimizer")}
    return layout.replace(**jax.tree_util.tree_map_with_path(of_weights, weights))


def lay_out(states: TrainState, mesh: Mesh) -> TrainState:
    """A copy of rows of states that come from elsewhere, padded to what the mesh divides, over its devices.

    In several processes each has them all.
    """
    states = pad_rows(states, mesh)
    layout = state_shardings(mesh, states)
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


def envs_are_split() -> bool:
    """Whether the environments of a row are split over devices, by the mesh of the surrounding `over_rows`."""
    return ENVS in jax.sharding.get_abstract_mesh().axis_names


def _constrained(tree: PyTree, spec: PartitionSpec) -> PyTree:
    if not envs_are_split():
        return tree
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, spec), tree)

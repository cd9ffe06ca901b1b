"""The programs that train a sweep: the rows of many settings at once, as many as fit into memory."""

import functools
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from grpo_jax.devices.mesh import make_row_mesh, over_rows, replicated, state_shardings
from grpo_jax.errors import ConfigError
from grpo_jax.recording.files import plain, read_archive, read_as
from grpo_jax.recording.metrics_file import VALUES
from grpo_jax.recording.policy_saver import KINDS, policy_file, write_policies
from grpo_jax.runs.memory import bytes_needed, device_memory
from grpo_jax.runs.processes import from_every_process, from_process_zero
from grpo_jax.runs.run_spec import RunSpec
from grpo_jax.runs.settings import Setting
from grpo_jax.sweeps.study import PROGRAMS
from grpo_jax.training.train import initial_states
from grpo_jax.training.train_step import make_train_step

SPLIT_FILE = Path(PROGRAMS) / "split.json"  # in the folder of a sweep


def make_programs(
    plans: Sequence[RunSpec], mesh: Mesh | None, *, memory_gib: float | None = None, resumed: Path | None = None
) -> list[RunSpec]:
    """The runs that train the sweep, with a row for each seed of each plan, by whose setting it is found.

    `memory_gib` may be used on each device; 80% of what there is by default. A sweep that goes on, in the folder
    `resumed`, stays split as it was, whatever the memory and the devices now are.
    """
    keys, programs = plans[0].keys, []
    for part in _saved_split(plans, resumed) or _split(plans, mesh, memory_gib):
        # The settings vary fastest, so that each device has rows of all of them.
        hyperparams = jax.tree.map(
            lambda *values: np.tile(np.array(values, np.float32), len(keys)), *(plan.hyperparams for plan in part)
        )
        label, rows = f"program {len(programs) + 1}: {len(part)} × {len(keys)} seeds", [plan.setting for plan in part]
        repeated = jnp.repeat(keys, len(part))
        programs.append(RunSpec(label, part[0].config, hyperparams, repeated, rows=rows * len(keys)))
    return programs


def split_policies(out: Path, programs: Sequence[RunSpec], plans: Sequence[RunSpec]) -> None:
    """Copies the rows of the plans from the policies of their programs to folders of their own."""
    for program in programs:
        rows = program.settings.rows
        chosen = [plan for plan in plans if plan.setting in rows]
        files = {which: policy_file(out / PROGRAMS, program, which) for which in ("final", "best") if chosen}
        saved = {which: read_archive(path, KINDS)[1] for which, path in files.items()}
        for plan in chosen:
            arrays = {
                which: {path: leaf[rows[plan.setting]] for path, leaf in leaves.items()}
                for which, leaves in saved.items()
            }
            write_policies(out, plan, arrays)


def _split(plans: Sequence[RunSpec], mesh: Mesh | None, memory_gib: float | None) -> list[list[RunSpec]]:
    available = 0.8 * (device_memory() or math.inf) if memory_gib is None else memory_gib * 2**30
    available = from_every_process(available).min()
    parts = []
    for _, group in itertools.groupby(plans, key=lambda plan: plan.config):
        together = list(group)
        num_parts = -(-len(together) // plans_at_once(together[0], len(together), mesh, available))
        parts += [together[i::num_parts] for i in range(num_parts)]
    return parts


def _saved_split(plans: Sequence[RunSpec], folder: Path | None) -> list[list[RunSpec]]:
    """Empty if the split in the folder is not of these plans; `prepare_folder` then says what differs."""
    if folder is None:
        return []
    path = folder / SPLIT_FILE
    saved = from_process_zero(lambda: read_as(path, list[list[VALUES]]) if path.exists() else [])
    known = {Setting(plain(plan.label)): plan for plan in plans}
    parts = [[known.get(Setting(values)) for values in part] for part in saved]
    is_same = None not in (found := [*itertools.chain(*parts)]) and len(found) == len(plans)
    return parts if is_same else []


def plans_at_once(plan: RunSpec, num_plans: int, mesh: Mesh | None, available: float) -> int:
    """How many plans, with all seeds, fit into `available` bytes on each device, by XLA's analysis of the program.

    All plans have the config and the number of seeds of this one. Raises ConfigError if a single one does not fit.
    """
    count, num_seeds = num_plans, len(plan.keys)
    # The largest need of any process, so that all make the same choice.
    while (needed := from_every_process(_bytes_needed(plan, count * num_seeds, mesh)).max()) > available:
        if count == 1:
            raise ConfigError(
                f"the {num_seeds} seeds of one configuration need {needed / 2**30:.3g} GiB on a device, and there are "
                f"{available / 2**30:.3g}; use --num-seeds {max(1, int(num_seeds * available / needed))} or fewer "
                "environments or steps"
            )
        count = min(count - 1, max(1, int(count * available / needed)))
    return count


def _bytes_needed(plan: RunSpec, num_rows: int, mesh: Mesh | None) -> int:
    """The memory that a train step of so many rows needs on each device."""
    mesh = make_row_mesh(num_rows) if mesh is None else mesh
    keys = jax.random.split(jax.random.key(0), num_rows)
    init = functools.partial(initial_states, plan.config, mesh=mesh)
    states = jax.eval_shape(init, plan.hyperparams.broadcast(num_rows), keys)
    layout = state_shardings(mesh, states)
    step = jax.jit(
        over_rows(make_train_step(plan.config), mesh),
        in_shardings=(layout,),
        out_shardings=(layout, replicated(mesh)),
        donate_argnums=0,
    )
    return bytes_needed(step.lower(states).compile())

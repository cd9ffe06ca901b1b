"""What of a sweep is trained at once: configurations that share a program with their seeds, as many as fit."""

import functools
import itertools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments.harness.grid import Sweep
from experiments.harness.runs import PROGRAMS, Plan
from grpo_jax import Config, Hyperparams, make_train_step
from grpo_jax.devices.memory import Memory, device_memory
from grpo_jax.devices.mesh import make_row_mesh, over_rows, replicated, state_shardings
from grpo_jax.devices.processes import from_every_process, from_process_zero
from grpo_jax.errors import ConfigError
from grpo_jax.recording.recorded_run import Subject
from grpo_jax.training.run import initial_states

SPLIT_FILE = Path(PROGRAMS) / "split.json"  # in the folder of a sweep


def make_programs(
    sweep: Sweep,
    keys: jax.Array,
    mesh: Mesh | None,
    *,
    memory_gib: float | None = None,
    resumed: Path | None = None,
) -> list[tuple[Subject, list[Plan]]]:
    """What is trained at once, with the configurations in it: a row for each seed of each.

    Args:
      sweep: the configurations.
      keys: `[num_seeds]`, of each configuration.
      mesh: over which rows are split; None as in `run`.
      memory_gib: what may be used on each device; 80% of what there is by default.
      resumed: folder of a sweep that goes on: it may have had other memory or other devices, and stays split as it was.
    """
    programs = []
    for plans in _saved_split(sweep, resumed) or _split(sweep, len(keys), mesh, memory_gib):
        # The configurations vary fastest, so that each device has some of all.
        hyperparams = jax.tree.map(
            lambda *values: np.tile(np.array(values, np.float32), len(keys)), *(plan.hyperparams for plan in plans)
        )
        config = plans[0].config
        name = f"program {len(programs) + 1}: {len(plans)} × {len(keys)} seeds on {config.env.name}"
        programs.append((Subject(name, config, hyperparams, jnp.repeat(keys, len(plans))), plans))
    return programs


def _split(sweep: Sweep, num_seeds: int, mesh: Mesh | None, memory_gib: float | None) -> list[list[Plan]]:
    available = 0.8 * (device_memory() or math.inf) if memory_gib is None else memory_gib * 2**30
    available = from_every_process(available).min()
    parts = []
    for config, group in itertools.groupby(sweep.plans, key=lambda plan: plan.config):
        plans = list(group)
        num_parts = -(-len(plans) // plans_at_once(config, len(plans), num_seeds, mesh, available))
        parts += [plans[i::num_parts] for i in range(num_parts)]
    return parts


def _saved_split(sweep: Sweep, folder: Path | None) -> list[list[Plan]]:
    """Empty if there is none of these configurations: `claim` then says what differs."""
    if folder is None:
        return []
    path = folder / SPLIT_FILE
    labels = from_process_zero(lambda: json.loads(path.read_text(encoding="utf-8")) if path.exists() else [])
    plans = {plan.label: plan for plan in sweep.plans}
    if sorted(itertools.chain(*labels)) != sorted(plans):
        return []
    return [[plans[label] for label in part] for part in labels]


def plans_at_once(config: Config, num_plans: int, num_seeds: int, mesh: Mesh | None, available: float) -> int:
    """How many configurations, all their seeds, fit into memory together, by XLA's analysis of the compiled program.

    Args:
      config: what they have in common.
      num_plans, num_seeds: how many there are.
      mesh: over which rows are split; None as in `run`.
      available: bytes on each device.

    Raises:
      ConfigError: not even one fits.
    """
    count = num_plans
    # Of all processes the most, so that they agree.
    while (needed := from_every_process(_bytes_needed(config, count * num_seeds, mesh)).max()) > available:
        if count == 1:
            raise ConfigError(
                f"the {num_seeds} seeds of one configuration need {needed / 2**30:.3g} GiB on a device, and there are "
                f"{available / 2**30:.3g}; use --num-seeds {max(1, int(num_seeds * available / needed))} or fewer "
                "environments or steps"
            )
        count = min(count - 1, max(1, int(count * available / needed)))
    return count


def _bytes_needed(config: Config, num_rows: int, mesh: Mesh | None) -> int:
    """On each device, by a train step of so many rows."""
    mesh = make_row_mesh(num_rows) if mesh is None else mesh
    keys, init = jax.random.split(jax.random.key(0), num_rows), functools.partial(initial_states, config, mesh=mesh)
    states = jax.eval_shape(init, Hyperparams().broadcast(num_rows), keys)
    layout = state_shardings(mesh, states)
    step = jax.jit(
        over_rows(make_train_step(config), mesh),
        in_shardings=(layout,),
        out_shardings=(layout, replicated(mesh)),
        donate_argnums=0,
    )
    memory = Memory(num_rows)
    memory.measure(step.lower(states).compile())
    return memory.needed

"""The configurations of a sweep, a grid or random points, and the programs that train as many at once as fit."""

import functools
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from grpo_jax import Hyperparams, make_train_step
from grpo_jax.commands.harness.flags import Settings, parse
from grpo_jax.commands.harness.runs import PROGRAMS
from grpo_jax.devices.memory import Memory, device_memory
from grpo_jax.devices.mesh import make_row_mesh, over_rows, replicated, state_shardings
from grpo_jax.devices.processes import from_every_process, from_process_zero
from grpo_jax.errors import ConfigError
from grpo_jax.recording import RunSpec
from grpo_jax.recording.files import read_checked
from grpo_jax.recording.metrics_file import format_value
from grpo_jax.recording.policy_saver import FOLDER, write_policies
from grpo_jax.training.train import initial_states

# Fields with several values, which are hence no axis.
LIST_FIELDS = ("hidden_sizes", "critic_hidden_sizes", "actor_observation", "lora_layers", "extras", "env_params")
SPLIT_FILE = Path(PROGRAMS) / "split.json"  # in the folder of a sweep


# --- configurations --------------------------------------------------------------------------------------------------


class Sweep(NamedTuple):
    """The planned runs, and where each lies on the axes."""

    axes: tuple[str, ...]  # names of the fields that vary
    points: list[tuple[float | str, ...]]  # for each plan, a value for each axis
    plans: list[RunSpec]


def make_sweep(flags: Sequence[str], keys: jax.Array, samples: int | None = None, seed: int = 0) -> Sweep:
    """The runs of flags of `grpo-jax train`, such as `["--learning-rate", "1e-4", "1e-3", "--num-envs", "64"]`.

    A flag with several values is an axis. Of each combination of `Config` fields, `samples` points are drawn, or, with
    None, the whole grid is taken.

    Raises:
      ConfigError: nothing varies, a value is not a number or comes twice, or the ends of a range are not
        0 < low < high.
    """
    values = _parse_values(flags)
    axes = {name: words for name, words in values.items() if len(words) > 1 and name not in LIST_FIELDS}
    fixed = [word for name, words in values.items() if name not in axes for word in (flag(name), *words)]
    if not axes:
        raise ConfigError("nothing to sweep: give a flag several values, such as --learning-rate 1e-4 1e-3 1e-2")
    if "environment" in axes or "config" in axes:
        raise ConfigError("returns of different environments cannot be ranked: use one --environment, or one --config")
    static = {name: words for name, words in axes.items() if name not in Hyperparams.__dataclass_fields__}
    traced = {name: [_number(word) for word in words] for name, words in axes.items() if name not in static}
    for name, numbers in traced.items():
        if not all(isinstance(number, float) for number in numbers):
            raise ConfigError(f"{flag(name)} {' '.join(axes[name])}: not all of them are numbers")
    settings = list(itertools.product(*traced.values())) if samples is None else _draws(traced, samples, seed)

    sweep = Sweep((*static, *traced), [], [])
    # All budgets are rows of one program, so "auto" chooses an algorithm for the smallest.
    for name in {"total_steps", "num_iterations"} & {*traced}:
        fixed += [flag(name), str(min(traced[name]))]
    for combination in itertools.product(*static.values()):
        chosen = [word for name, value in zip(static, combination, strict=True) for word in (flag(name), value)]
        base = parse(Settings, fixed + chosen)
        for setting in settings:
            point = (*map(_number, combination), *setting)
            label = ", ".join(f"{name}={format_value(value)}" for name, value in zip(sweep.axes, point, strict=True))
            hyperparams = base.hyperparams.replace(**dict(zip(traced, setting, strict=True)))
            sweep.points.append(point)
            sweep.plans.append(RunSpec(label, base.config, hyperparams, keys))
    _check_distinct(sweep, len(static))
    return sweep


def _check_distinct(sweep: Sweep, num_static: int) -> None:
    """Raises ConfigError if two plans are the same run: their values are equal in float32."""
    labels: dict[tuple, str] = {}
    for point, plan in zip(sweep.points, sweep.plans, strict=True):
        run = plan.config, *map(np.float32, point[num_static:])
        if run in labels:
            raise ConfigError(
                f"the sweep has a value twice: {labels[run]} and {plan.label} are the same run; leave one of them out"
            )
        labels[run] = plan.label


def _parse_values(flags: Sequence[str]) -> dict[str, list[str]]:
    """The words that follow each flag; those of its last occurrence, if it comes twice."""
    values: dict[str, list[str]] = {}
    for word in flags:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            values[name := name.replace("-", "_")] = [value] if value else []
        elif not values:
            raise ConfigError(f"{word!r} follows no flag; write --name value value ...")
        else:
            values[name].append(word)
    return values


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _number(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word


def _draws(ranges: dict[str, list[float]], samples: int, seed: int) -> list[tuple[float, ...]]:
    """Distinct points drawn log-uniformly, rounded to four digits if that keeps them distinct."""
    for name, ends in ranges.items():
        if len(ends) != 2 or not 0 < ends[0] < ends[1] < math.inf:
            raise ConfigError(
                f"{flag(name)} {' '.join(map(format_value, ends))} is no range to draw from on a logarithmic scale; "
                "use two values, 0 < low < high"
            )
    if not ranges:
        raise ConfigError("--samples needs a range to draw from, such as --learning-rate 1e-4 1e-2")
    low, high = np.log(np.array(list(ranges.values()))).T
    drawn = np.exp(np.random.default_rng(seed).uniform(low, high, size=(samples, len(ranges))))
    for digits in range(4, 10):  # with nine, any two numbers of float32 differ
        points = [tuple(float(f"{value:.{digits}g}") for value in row) for row in drawn]
        if len(set(points)) == samples:
            break
    return points


# --- programs --------------------------------------------------------------------------------------------------------


def make_programs(
    sweep: Sweep, mesh: Mesh | None, *, memory_gib: float | None = None, resumed: Path | None = None
) -> list[tuple[RunSpec, list[RunSpec]]]:
    """The runs that train the sweep, with a row for each seed of each plan, and the plans in each of them.

    `memory_gib` may be used on each device; 80% of what there is by default. A sweep that goes on, in the folder
    `resumed`, stays split as it was, whatever the memory and the devices now are.
    """
    keys, programs = sweep.plans[0].keys, []
    for plans in _saved_split(sweep, resumed) or _split(sweep, mesh, memory_gib):
        # The configurations vary fastest, so that each device has rows of all of them.
        hyperparams = jax.tree.map(
            lambda *values: np.tile(np.array(values, np.float32), len(keys)), *(plan.hyperparams for plan in plans)
        )
        label = f"program {len(programs) + 1}: {len(plans)} × {len(keys)} seeds"
        programs.append((RunSpec(label, plans[0].config, hyperparams, jnp.repeat(keys, len(plans))), plans))
    return programs


def split_policies(out: Path, programs: Sequence[tuple[RunSpec, list[RunSpec]]], labels: set[str]) -> None:
    """Copies the rows of the plans with these labels from the policies of their programs to folders of their own."""
    for program, plans in programs:
        folder = out / PROGRAMS / FOLDER / program.folder
        settings = zip(plans, program.settings.rows.values(), strict=True)
        chosen = [(plan, setting) for plan, setting in settings if plan.label in labels]
        saved = {which: read_checked(folder / f"{which}.safetensors")[0] for which in ("final", "best") if chosen}
        for plan, setting in chosen:
            rows = {which: {path: leaf[setting] for path, leaf in saved[which].items()} for which in saved}
            write_policies(out, plan, rows)


def _split(sweep: Sweep, mesh: Mesh | None, memory_gib: float | None) -> list[list[RunSpec]]:
    available = 0.8 * (device_memory() or math.inf) if memory_gib is None else memory_gib * 2**30
    available = from_every_process(available).min()
    parts = []
    for _, group in itertools.groupby(sweep.plans, key=lambda plan: plan.config):
        plans = list(group)
        num_parts = -(-len(plans) // plans_at_once(plans[0], len(plans), mesh, available))
        parts += [plans[i::num_parts] for i in range(num_parts)]
    return parts


def _saved_split(sweep: Sweep, folder: Path | None) -> list[list[RunSpec]]:
    """Empty if the split in the folder is not of these plans; `prepare_folder` then says what differs."""
    if folder is None:
        return []
    path = folder / SPLIT_FILE
    labels = from_process_zero(lambda: json.loads(path.read_text(encoding="utf-8")) if path.exists() else [])
    plans = {plan.label: plan for plan in sweep.plans}
    if sorted(itertools.chain(*labels)) != sorted(plans):
        return []
    return [[plans[label] for label in part] for part in labels]


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
    memory = Memory(num_rows)
    memory.measure(step.lower(states).compile())
    return memory.needed

"""`sweep`: trains every setting of a grid with the same seeds, and ranks the settings."""

import itertools
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from grpo_jax.algorithms import name_of
from grpo_jax.config import Config
from grpo_jax.errors import ConfigError, as_count
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.recording.config_file import as_fields
from grpo_jax.recording.figures import NUM_DRAWN
from grpo_jax.recording.files import read_archive, write_json
from grpo_jax.recording.metrics_logger import MetricsLogger
from grpo_jax.recording.policy_saver import FOLDER as POLICIES
from grpo_jax.recording.policy_saver import KINDS, policy_file, write_policies
from grpo_jax.recording.recorder import NO_ITERATIONS, as_recording, check_known
from grpo_jax.recording.run_folder import Recording
from grpo_jax.runs.processes import is_process_zero
from grpo_jax.runs.progress import Chunk
from grpo_jax.runs.run_spec import RunSpec, Setting
from grpo_jax.sweeps.grid import make_bases, make_grid
from grpo_jax.sweeps.pictures import plot, plot_axes
from grpo_jax.sweeps.runs import SweepResult, run_keys
from grpo_jax.sweeps.study import PROGRAMS, Study

OPTIONS = {"evaluate", "mesh", "console", "rows_at_once"}


def sweep(
    configs: Config | Mapping[str, Config],
    values: Mapping[str, Any] | None = None,
    *,
    out: Recording | str | Path,
    num_seeds: int = 8,
    hyperparams: Hyperparams | None = None,
    total_steps: float | None = None,
    samples: int | None = None,
    seed: int = 0,
    **options: Any,
) -> SweepResult:
    """Trains every combination of values with the same seeds, and ranks the settings by their means over seeds.

    All else is as given: the config and hyperparameters of `tuned`, as in `grpo-jax sweep`, or plain defaults.

    ```python
    from grpo_jax import plot, sweep, tuned

    config, hyperparams = tuned("CartPole-v1", "ppo", total_steps=100_000)
    values = {"learning_rate": [3e-4, 1e-3], "gae_lambda": [0.9, 0.95]}
    result = sweep(config, values, hyperparams=hyperparams, out="runs/my_sweep")
    print(result)  # the ranking
    policy = result.load()  # of the best setting, all seeds
    plot(result, "curves.png")
    ```

    Values of `Hyperparams` are rows of one compiled program; those of fields of `Config` need a program each, one after
    another. The folder gets pictures (`sweep.png`, `learning_curves.png`), `metrics.jsonl`, `summary.json`, `best.json`
    and the policies of the best ten settings.

    Args:
      configs: one, or several by their names: `{"ppo": Config(algorithm="ppo"), "grpo": Config(algorithm="grpo")}`.
      values: for a field of `Hyperparams` or `Config`, a list of values, or one value for all settings.
      out: folder of the results, or `Recording(folder, ...)`, with which a sweep is resumed.
      num_seeds: of each setting.
      hyperparams: those that do not vary; by default `Hyperparams()`.
      total_steps: environment steps of each seed, in place of those of `hyperparams`.
      samples: draw so many settings, log-uniformly between the two values of each hyperparameter, instead of a grid.
      seed: of all randomness.
      options: `evaluate` and `mesh` of `run`, `console` of `recorded_run`, and `rows_at_once`: the
        most rows that are trained together, for sweeps that need more memory than there is.

    Raises:
      ConfigError: nothing varies, a field is unknown, a value comes twice or does not fit the others.
      FileExistsError, StopSignal, MemoryError, OSError: as `recorded_run`.
    """
    check_known("sweep", options, OPTIONS)
    hyperparams = Hyperparams() if hyperparams is None else hyperparams
    if not isinstance(hyperparams, Hyperparams):
        raise ConfigError(f"hyperparams={hyperparams!r} must be one Hyperparams(...); what varies is in values")
    if total_steps is not None:
        hyperparams = hyperparams.replace(total_steps=total_steps)
    if not isinstance(seed, int | np.integer) or seed < 0:
        raise ConfigError(f"seed={seed!r} must be a whole number from 0")
    keys, evaluation_keys = run_keys(seed, as_count("num_seeds", num_seeds))
    bases, traced = make_bases(configs, values or {}, hyperparams, keys)
    plans = make_grid(bases, traced, None if samples is None else as_count("samples", samples), seed)
    return train_grid(plans, as_recording(out), evaluation_keys, **options)


def train_grid(
    plans: Sequence[RunSpec],
    recording: Recording,
    evaluation_keys: jax.Array,
    *,
    mesh: Mesh | None = None,
    rows_at_once: int | None = None,
    console: bool | Console = True,
    **options: Any,
) -> SweepResult:
    """Trains the settings of a grid, records each as a run of its own, and writes the ranking and its pictures.

    `options` are `evaluate` of `run` and the `score` of a `Study`; for the others see `sweep`.
    """
    recording.check()
    programs, out = make_programs(plans, rows_at_once), recording.out
    if isinstance(console, bool):
        console = Console(quiet=not (console and is_process_zero()))
    study = Study(plans, recording, mesh=mesh, console=console, programs=programs, **options)
    for program in programs:
        _train_program(study, program, evaluation_keys, resume=recording.resume)
    runs = {run.setting: run for run in study.runs}  # in the order of the programs
    result = SweepResult(out, [runs[plan.setting] for plan in plans])
    best = result.ranking[0]
    study.write_summary(best=best.values)
    write_json(study.out / "best.json", as_fields(best.config, best.hyperparams))
    plot_axes(result, study.out / "sweep.png")
    plot(result, study.out / "learning_curves.png")
    if is_process_zero() and recording.policies:
        _split_policies(study, programs, {run.setting for run in result.ranking[:NUM_DRAWN]})
        if not (study.out / PROGRAMS / "checkpoints").exists():  # else a sweep that is resumed needs them
            shutil.rmtree(study.out / PROGRAMS / POLICIES)
    return result


def make_programs(plans: Sequence[RunSpec], rows_at_once: int | None = None) -> list[RunSpec]:
    """The runs that train the sweep, with a row for each seed of each plan, by whose setting it is found."""
    keys, parts = plans[0].keys, []
    if rows_at_once is not None and as_count("rows_at_once", rows_at_once) < len(keys):
        raise ConfigError(f"rows_at_once={rows_at_once} is less than the {len(keys)} seeds of one setting")
    for _, group in itertools.groupby(plans, key=lambda plan: plan.config):
        together = list(group)
        num_parts = -(-len(together) // (rows_at_once // len(keys))) if rows_at_once else 1
        parts += [together[i::num_parts] for i in range(num_parts)]
    programs = []
    for number, part in enumerate(parts, start=1):
        # The settings vary fastest, so that each device has rows of all of them.
        hyperparams = jax.tree.map(
            lambda *values: np.tile(np.array(values, np.float32), len(keys)), *(plan.hyperparams for plan in part)
        )
        name, rows = name_of(part[0].config.algorithm), [plan.setting for plan in part]
        label = f"program {number}: {name}, {len(part)} × {len(keys)} seeds"
        repeated = jnp.repeat(keys, len(part))
        programs.append(RunSpec(label, part[0].config, hyperparams, repeated, rows=rows * len(keys)))
    return programs


def _train_program(study: Study, program: RunSpec, evaluation_keys: jax.Array, *, resume: bool) -> None:
    """Trains the rows of several plans at once, and records each plan as a separate run.

    They share the time of their program: the steps per second of each are a part of the program's.
    """
    settings, plans, runs = program.settings.rows, {plan.setting: plan for plan in study.plans}, []
    together = study.train(program, jnp.repeat(evaluation_keys, len(settings)))
    for setting, rows in settings.items():
        plan = plans[setting]
        run = together.of_rows(rows, setting, plan.hyperparams)
        past = NO_ITERATIONS if resume else None  # what an interrupted sweep has written is replaced
        with MetricsLogger(study.out, plan, console=False, past=past) as logger:
            logger.record(Chunk(run.result.metrics, run.result.steps, iteration=0, seconds=run.result.train_seconds))
        runs.append(run)
    study.add(*runs)


def _split_policies(study: Study, programs: Sequence[RunSpec], settings: Collection[Setting]) -> None:
    """Copies the rows of these settings from the policies of their programs to folders of their own."""
    plans = {plan.setting: plan for plan in study.plans}
    for program in programs:
        chosen = {setting: rows for setting, rows in program.settings.rows.items() if setting in settings}
        for which in ("final", "best") if chosen else ():
            _, saved = read_archive(policy_file(study.out / PROGRAMS, program, which), KINDS)
            for setting, rows in chosen.items():
                arrays = {path: leaf[rows] for path, leaf in saved.items()}
                write_policies(study.out, plans[setting], {which: arrays})

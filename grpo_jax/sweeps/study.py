"""Runs in one folder: each is trained, evaluated, recorded, and summed up in summary.json."""

import dataclasses
import functools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from grpo_jax.config import Config, kept_with
from grpo_jax.devices.mesh import make_row_mesh, make_rows_function
from grpo_jax.errors import ConfigError
from grpo_jax.evaluation.episodes import check_evaluable
from grpo_jax.recording.files import write_json
from grpo_jax.recording.recorder import record
from grpo_jax.recording.run_folder import SUMMARY_FILE, Recording, StopSignal, prepare_folder
from grpo_jax.runs.evaluations import Evaluate
from grpo_jax.runs.processes import from_process_zero, is_process_zero
from grpo_jax.runs.programs import kept_programs
from grpo_jax.runs.run_spec import RunSpec, hardware, versions
from grpo_jax.sweeps.runs import SAMPLED_RETURN, Run, Score, summarise
from grpo_jax.training.checks import check_mesh, check_read, check_run
from grpo_jax.types import TrainState

PROGRAMS = "programs"
"""The folder of the runs that are trained, where several plans share a program."""


def check_plans(plans: Sequence[RunSpec], mesh: Mesh | None = None) -> None:
    """Raises ConfigError if a run cannot be made, or two would have one folder."""
    folders: dict[str, RunSpec] = {}
    for plan in plans:
        check_run(plan.config, plan.hyperparams)
        if mesh is not None:
            check_mesh(plan.config, mesh)
        same = folders.setdefault(plan.setting.folder.casefold(), plan)
        if same is not plan:
            raise ConfigError(
                f"two runs would have one folder: {same.setting} and {plan.setting}; leave one out, or give them names "
                "that differ in letters or digits, such as sweep({name: Config(...), ...}, ...)"
            )
    check_read(*((plan.config, plan.hyperparams) for plan in plans))


class Study:
    """The runs of one experiment and the folder of their results, which is made and locked once the runs are checked.

    Where several plans share a program, `programs` are the runs that are trained and recorded, in the folder
    `PROGRAMS`. The other arguments are those of `recorded_run`, and the score of trained policies.
    """

    def __init__(
        self,
        plans: Sequence[RunSpec],
        recording: Recording,
        *,
        evaluate: Evaluate | None = None,
        score: Score = SAMPLED_RETURN,
        mesh: Mesh | None = None,
        console: Console,
        programs: Sequence[RunSpec] | None = None,
    ):
        check_plans(plans, mesh)
        if score.function is not None:
            for plan in plans:
                check_evaluable(plan.config)
        trained = programs or plans
        self.plans, self.out, self.console, self.runs = plans, recording.out, console, []
        self._recording, self._evaluate, self._score, self.mesh = recording, evaluate, score, mesh
        self._subfolder = PROGRAMS if programs else ""
        self.about: dict[str, Any] = {}  # what else summary.json says
        options = {"resume": recording.resume, "subfolder": self._subfolder}
        from_process_zero(lambda: prepare_folder(self.out, trained, **options))
        if not is_process_zero():  # the files of the other processes are not kept
            self._temporary = tempfile.TemporaryDirectory()
            self.out = Path(self._temporary.name)
        (self.out / self._subfolder).mkdir(exist_ok=True)

    def train(self, plan: RunSpec, evaluation_keys: jax.Array, **options: Any) -> Run:
        """Makes a run of all rows of a plan, or the rest of it, and evaluates each row with one of the keys.

        `options` are `params`, `normalizer` and `callback` of `run`.
        """
        started, core_started = time.perf_counter(), time.process_time()
        group = self._recording.wandb_group or (self.out.resolve().name if self._subfolder else None)
        try:
            result, warnings = record(
                plan,
                dataclasses.replace(self._recording, out=self.out / self._subfolder, wandb_group=group),
                evaluate=self._evaluate,
                console=self.console,
                mesh=self.mesh,
                **options,
            )
        except StopSignal as stop:
            stop.folder = self.out
            raise
        final_returns = np.full(len(evaluation_keys), np.nan)
        if self._score.function is not None:
            final_returns = self._final_returns(plan.config, plan.setting.title, result.states, evaluation_keys)
        return Run(
            plan.setting,
            plan.config,
            plan.hyperparams,
            result,
            final_returns,
            wall_seconds=time.perf_counter() - started,
            core_seconds=time.process_time() - core_started,
            warnings=warnings,
        )

    def _final_returns(self, config: Config, title: str, states: TrainState, keys: jax.Array) -> np.ndarray:
        mesh = make_row_mesh(len(keys)) if self.mesh is None else self.mesh
        score = functools.partial(self._score.function, config)
        scores = kept_with(config, (self._score, mesh), lambda: make_rows_function(score, mesh))
        self.console.print(f"{title}: final evaluation, {self._score.caption}", markup=False, soft_wrap=True)
        with kept_programs():
            return scores(states, keys).astype(np.float64)

    def add(self, *runs: Run) -> None:
        """Adds finished runs to the study and to summary.json, so that an interrupted study keeps them."""
        self.runs += runs
        self.write_summary()

    def write_summary(self, **more: Any) -> None:
        """Writes summary.json, with `more` before the runs."""
        runs = [summarise(run) for run in self.runs]
        about = {"final_return": self._score.caption, "versions": versions(), "hardware": hardware()}
        write_json(self.out / SUMMARY_FILE, {**more, "runs": runs, **about, **self.about})

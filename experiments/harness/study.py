"""What every experiment does with its runs: train, evaluate, record, and show them side by side."""

import dataclasses
import datetime
import functools
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.harness.command import DeviceArguments, hardware, parse_mesh, versions
from experiments.harness.console import make_console
from experiments.harness.figures import plot_curves, table
from experiments.harness.runs import PROGRAMS, SAMPLED_RETURN, Plan, Run, Score, summarise
from grpo_jax import Config, TrainState
from grpo_jax.devices.mesh import make_row_mesh, over_rows, pad_rows, replicated
from grpo_jax.devices.processes import from_process_zero, is_process_zero
from grpo_jax.errors import ConfigError
from grpo_jax.recording.files import given_back_if_unused, write_json
from grpo_jax.recording.recorded_run import RecordingArguments, Subject, claim, recorded_run
from grpo_jax.training.budget import check_budget
from grpo_jax.training.run import Progress, check_mesh
from grpo_jax.types import PyTree


@dataclasses.dataclass
class StudyArguments(RecordingArguments, DeviceArguments):
    """What every experiment takes from the command line."""

    num_seeds: int = 16
    """Independent runs of each algorithm, in one program."""
    seed: int = 0
    """Of everything random."""
    out: Path | None = None
    """Folder for the results; a new one under runs/ if left out."""
    compilation_cache: bool = True
    """Keep compiled programs in ~/.cache/grpo_jax: from the second start on, seconds instead of tens of seconds."""

    def keys(self) -> tuple[jax.Array, jax.Array]:
        """`[num_seeds]` keys to train with, and to evaluate with."""
        of_training, of_evaluation = jax.random.split(jax.random.key(self.seed))
        return jax.random.split(of_training, self.num_seeds), jax.random.split(of_evaluation, self.num_seeds)


def check_plans(plans: list[Plan], arguments: StudyArguments, max_episodes: float = math.inf) -> Mesh | None:
    """The mesh that the flags ask for; raises ConfigError if some plan could not run, before anything is written."""
    if arguments.num_seeds < 1:
        raise ConfigError(f"num_seeds={arguments.num_seeds} is not a positive integer")
    arguments.check(arguments.out)
    mesh = parse_mesh(arguments.mesh)
    for plan in plans:
        check_budget(plan.config, plan.hyperparams, max_episodes)
        if mesh is not None:
            check_mesh(plan.config, mesh)
    return mesh


class Study:
    """The runs of one experiment and the folder of their results.

    It takes the whole plan and checks it before it makes the folder, so that a mistake costs nothing.

    Args:
      name: of the folder, if the arguments have none.
      plans: what to run.
      arguments: from the command line.
      max_episodes: see `run`.
      score: what a trained policy is worth.
      programs: what is trained and recorded, in the folder `PROGRAMS`, where that is not each plan by itself.
    """

    def __init__(
        self,
        name: str,
        plans: list[Plan],
        arguments: StudyArguments,
        *,
        max_episodes: float = math.inf,
        score: Score = SAMPLED_RETURN,
        programs: list[Subject] | None = None,
    ):
        self.mesh = check_plans(plans, arguments, max_episodes)
        keys, self._keys_evaluate = arguments.keys()
        self.subjects = programs or [
            Subject(f"{plan.label} on {plan.config.env.name}", plan.config, plan.hyperparams, keys, max_episodes)
            for plan in plans
        ]
        self._within = PROGRAMS if programs else ""
        if len({subject.folder for subject in self.subjects}) < len(self.subjects):
            raise ConfigError("two runs have the same name, so their records would be mixed up; leave one out")
        stamp = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        self.out = arguments.out or Path("runs") / f"{name}_{stamp}"
        self.console = make_console(quiet=not is_process_zero())
        with given_back_if_unused(self.out):
            told = from_process_zero(lambda: claim(self.out, self.subjects, arguments, versions(), within=self._within))
        for line in told:
            self.console.print(line, soft_wrap=True)
        if not is_process_zero():  # what the other processes of a run write is seen by nobody
            self._nowhere = tempfile.TemporaryDirectory()
            self.out = Path(self._nowhere.name)
            (self.out / self._within).mkdir(exist_ok=True)
        self.runs: list[Run] = []
        self.plans = plans
        self._num_seeds, self._arguments, self._score = arguments.num_seeds, arguments, score
        if arguments.compilation_cache:
            cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "grpo_jax" / "xla"
            jax.config.update("jax_compilation_cache_dir", str(cache))

    def run_all(
        self,
        params: Callable[[Config], PyTree] | None = None,
        watch: Callable[[Plan, Progress], None] | None = None,
    ) -> list[TrainState]:
        """Makes the planned runs, one after the other; returns the trained states of each, `[num_seeds, ...]`.

        Policies start from `params(config)`, `[num_seeds, ...]`, if given. `watch` is called as `run` calls `save`.
        """
        return [self._run(*what, params, watch) for what in zip(self.plans, self.subjects, strict=True)]

    def _run(self, plan: Plan, subject: Subject, params: Callable | None, watch: Callable | None) -> TrainState:
        """Trains all seeds in one program, with live progress and metrics.jsonl, and evaluates them."""
        made = self.train(
            subject,
            self._keys_evaluate,
            params=None if params is None else params(plan.config),
            watch=None if watch is None else functools.partial(watch, plan),
        )
        states = made.result.states
        self.record(made._replace(label=plan.label, result=made.result._replace(states=None)))
        return states

    def train(
        self,
        subject: Subject,
        keys_evaluate: jax.Array,
        *,
        params: PyTree = None,
        watch: Callable[[Progress], None] | None = None,
    ) -> Run:
        """Makes the run of all rows of a subject, or the rest of it, and evaluates them, one key each."""
        started, core_started = time.perf_counter(), time.process_time()
        result, warnings = recorded_run(
            subject,
            self.out,
            self._arguments,
            versions=versions(),
            console=self.console,
            params=params,
            watch=watch,
            mesh=self.mesh,
            within=self._within,
        )
        final_returns = evaluate_rows(subject.config, result.states, keys_evaluate, self.mesh, score=self._score)
        return Run(
            subject.name,
            subject.config,
            subject.hyperparams,
            result,
            final_returns,
            wall_seconds=time.perf_counter() - started,
            core_seconds=time.process_time() - core_started,
            warnings=warnings,
        )

    def record(self, *done: Run) -> None:
        """Keeps runs, also in summary.json: an interrupted study keeps what it has."""
        self.runs += done
        write_json(
            self.out / "summary.json",
            {"runs": [summarise(run) for run in self.runs], "versions": versions(), "hardware": hardware()},
        )

    def finish(self, *, over: str = "environment steps", notes: Mapping[str, str] | None = None) -> None:
        """Draws learning_curves.png (over "environment steps" or "episodes") and prints the tables.

        `notes` say something of runs by their labels, below their table.
        """
        plot_curves(self.runs, self.out / "learning_curves.png", over)
        for environment in dict.fromkeys(run.environment for run in self.runs):
            self.console.print(table([run for run in self.runs if run.environment == environment], notes or {}))
        seeds = f"IQM and 95% interval over {self._num_seeds} seeds, {self._score.caption}"
        self.console.print(f"Final return: {seeds}.", soft_wrap=True)
        self.console.print(f"Results in {self.out}: summary.json, metrics.jsonl, learning_curves.png", soft_wrap=True)


def evaluate_rows(
    config: Config,
    states: TrainState,
    keys: jax.Array,
    mesh: Mesh | None,
    *,
    score: Score = SAMPLED_RETURN,
) -> np.ndarray:
    """`[R]` score of each row's final policy; one key each."""
    num_rows, mesh = len(keys), make_row_mesh(len(keys)) if mesh is None else mesh
    of_rows = over_rows(lambda row: score.of(config, *row), mesh)

    def of_all(*rows):  # states of several processes come padded
        return of_rows(tuple(pad_rows(each, mesh) for each in rows))

    final_returns = jax.jit(of_all, out_shardings=replicated(mesh))(states, keys)
    return np.asarray(final_returns, np.float64)[:num_rows]

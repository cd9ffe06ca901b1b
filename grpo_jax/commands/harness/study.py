"""The steps that commands and studies share: train, evaluate, record and compare runs."""

import dataclasses
import functools
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import numpy as np
import tyro
from jax.sharding import Mesh

from grpo_jax import Config, TrainState
from grpo_jax.commands.harness.command import DeviceArguments, hardware, make_console, mesh_sizes, new_folder
from grpo_jax.commands.harness.figures import plot_curves, table
from grpo_jax.commands.harness.limits import Seed, Seeds
from grpo_jax.commands.harness.runs import PROGRAMS, SAMPLED_RETURN, Run, Score, summarise
from grpo_jax.devices.compilation_cache import keep_programs
from grpo_jax.devices.mesh import make_mesh, make_row_mesh, make_rows_function
from grpo_jax.devices.processes import from_process_zero, is_process_zero
from grpo_jax.errors import ConfigError
from grpo_jax.recording.files import write_json
from grpo_jax.recording.folder_lock import StopSignal, clean_up_on_error
from grpo_jax.recording.policy_saver import FOLDER as POLICIES
from grpo_jax.recording.recorder import record
from grpo_jax.recording.run_spec import Recording, RunSpec, prepare_folder, versions
from grpo_jax.training.checks import check_mesh, check_run
from grpo_jax.training.evaluations import Evaluate, no_progress, reached_return
from grpo_jax.training.progress import Chunk, Progress
from grpo_jax.types import PyTree


@dataclasses.dataclass
class RecordingArguments(Recording):
    """What is recorded of a run; `StudyArguments` has its folder."""

    out: tyro.conf.Suppress[tyro.conf.Fixed[Path | None]] = None


@dataclasses.dataclass
class EvaluationArguments:
    """Evaluations while training."""

    evaluate_every: int = 0
    """Iterations between two evaluations of the policies, with sampled and with greedy actions; 0 for none."""
    evaluation_episodes: int = 32
    """Episodes of each evaluation."""
    stop_at_return: float | None = None
    """Stop a seed once the return of an evaluation (sampled actions) is at least this."""
    stop_without_progress: int | None = None
    """Stop a seed after this many evaluations in a row without a better return."""

    def make(self) -> Evaluate | None:
        """The evaluations; raises ConfigError if a criterion has none to decide by."""
        criteria = []
        if self.stop_at_return is not None:
            criteria.append(reached_return(self.stop_at_return))
        if self.stop_without_progress is not None:
            criteria.append(no_progress(self.stop_without_progress))
        if not self.evaluate_every:
            if criteria:
                raise ConfigError(
                    "--stop-at-return and --stop-without-progress decide by evaluations, but there are none; set "
                    "--evaluate-every, such as 10"
                )
            return None

        def stop_when(evaluations):
            return np.any([criterion(evaluations) for criterion in criteria], axis=0)

        return Evaluate(self.evaluate_every, self.evaluation_episodes, stop_when if criteria else None)


@dataclasses.dataclass(kw_only=True)
class StudyArguments:
    """The flags of every comparison of runs."""

    num_seeds: Seeds = 16
    """Independent runs of each algorithm, in one program."""
    seed: Seed = 0
    """Seed of all randomness."""
    out: Path | None = None
    """Folder for the results; a new one under runs/ if left out."""
    compilation_cache: bool = True
    """Keep compiled programs in ~/.cache/grpo_jax: from the second start on, seconds instead of tens of seconds."""
    recording: RecordingArguments = dataclasses.field(default_factory=RecordingArguments)
    evaluation: EvaluationArguments = dataclasses.field(default_factory=EvaluationArguments)
    devices: DeviceArguments = dataclasses.field(default_factory=DeviceArguments)

    @property
    def training_keys(self) -> jax.Array:
        """`[num_seeds]`."""
        return jax.random.split(jax.random.split(jax.random.key(self.seed))[0], self.num_seeds)

    @property
    def evaluation_keys(self) -> jax.Array:
        """`[num_seeds]`."""
        return jax.random.split(jax.random.split(jax.random.key(self.seed))[1], self.num_seeds)


def check_plans(plans: list[RunSpec], arguments: StudyArguments) -> Mesh | None:
    """The mesh of the flags; raises ConfigError if a plan cannot be run, before anything is written."""
    if arguments.recording.resume and arguments.out is None:
        raise ConfigError("--resume needs the folder of the run; name it with --out")
    arguments.recording.check()
    arguments.evaluation.make()
    sizes = arguments.devices.mesh
    mesh = make_mesh(**mesh_sizes(sizes, "--mesh")) if sizes else None
    for plan in plans:
        check_run(plan.config, plan.hyperparams)
        if mesh is not None:
            check_mesh(plan.config, mesh)
    return mesh


class Study:
    """The runs of one experiment and the folder of their results.

    All plans are checked before the folder is created, so that a mistake costs nothing.

    Args:
      name: name of the folder, if the arguments have none.
      plans: the runs.
      arguments: flags of the command line.
      score: the score of trained policies.
      programs: the runs that are trained and recorded, in the folder `PROGRAMS`, if several plans share a program.
    """

    def __init__(
        self,
        name: str,
        plans: list[RunSpec],
        arguments: StudyArguments,
        *,
        score: Score = SAMPLED_RETURN,
        programs: list[RunSpec] | None = None,
    ):
        self.mesh = check_plans(plans, arguments)
        trained = programs or plans
        if len({plan.folder for plan in trained}) < len(trained):
            raise ConfigError("two runs have the same name, so their records would be mixed up; leave one out")
        self.out = arguments.out or new_folder(name)
        self.console = make_console(quiet=not is_process_zero())
        self._subfolder = PROGRAMS if programs else ""
        with clean_up_on_error(self.out):
            from_process_zero(
                lambda: prepare_folder(self.out, trained, resume=arguments.recording.resume, subfolder=self._subfolder)
            )
        if not is_process_zero():  # the files of the other processes are not kept
            self._temporary = tempfile.TemporaryDirectory()
            self.out = Path(self._temporary.name)
            (self.out / self._subfolder).mkdir(exist_ok=True)
        self.plans = plans
        self.runs: list[Run] = []
        self._arguments, self._score = arguments, score
        if arguments.compilation_cache:
            keep_programs()
        else:  # also for a warm start, before the run
            jax.config.update("jax_enable_compilation_cache", False)

    def run_all(
        self,
        params: Callable[[Config], PyTree] | None = None,
        callback: Callable[[RunSpec, Progress, Chunk | None], None] | None = None,
    ) -> list[TrainState]:
        """Makes the planned runs, one after the other; returns the trained states of each, `[num_seeds, ...]`.

        Policies start from `params(config)`, `[num_seeds, ...]`, if given. `callback` is that of `run`, with the plan
        as its first argument.
        """
        trained = []
        for plan in self.plans:
            run = self.train(
                plan,
                self._arguments.evaluation_keys,
                params=None if params is None else params(plan.config),
                callback=None if callback is None else functools.partial(callback, plan),
            )
            trained.append(run.result.states)
            self.add(run._replace(result=run.result._replace(states=None)))
        return trained

    def train(
        self,
        plan: RunSpec,
        evaluation_keys: jax.Array,
        *,
        params: PyTree = None,
        callback: Callable[[Progress, Chunk | None], None] | None = None,
    ) -> Run:
        """Makes a run of all rows of a plan, or the rest of it, and evaluates each row with one of the keys."""
        started, core_started = time.perf_counter(), time.process_time()
        folder = self.out / self._subfolder
        try:
            with clean_up_on_error(self.out):
                result, warnings = record(
                    plan,
                    dataclasses.replace(self._arguments.recording, out=folder),
                    evaluate=self._arguments.evaluation.make(),
                    callback=callback,
                    console=self.console,
                    params=params,
                    mesh=self.mesh,
                    compilation_cache=self._arguments.compilation_cache,
                )
        except StopSignal as stop:
            if is_process_zero():
                message = f"{stop.name}: saved. To go on, repeat the command with --resume --out {self.out}"
                print(message, file=sys.stderr)
            raise
        mesh = make_row_mesh(len(evaluation_keys)) if self.mesh is None else self.mesh
        scores = make_rows_function(functools.partial(self._score.function, plan.config), mesh)
        with self.console.status(f"{plan.name}: evaluating"):
            final_returns = scores(result.states, evaluation_keys).astype(np.float64)
        return Run(
            plan.label,
            plan.config,
            plan.hyperparams,
            result,
            final_returns,
            wall_seconds=time.perf_counter() - started,
            core_seconds=time.process_time() - core_started,
            warnings=warnings,
        )

    def add(self, *runs: Run) -> None:
        """Adds finished runs to the study and to summary.json, so that an interrupted study keeps them."""
        self.runs += runs
        write_json(
            self.out / "summary.json",
            {"runs": [summarise(run) for run in self.runs], "versions": versions(), "hardware": hardware()},
        )

    def finish(self, *, over: str = "environment steps", notes: Mapping[str, str] | None = None) -> None:
        """Draws learning_curves.png (over "environment steps" or "episodes") and prints the tables.

        `notes` on some runs, by their labels, are printed below the tables.
        """
        plot_curves(self.runs, self.out / "learning_curves.png", over)
        for environment in dict.fromkeys(run.environment for run in self.runs):
            self.console.print(table([run for run in self.runs if run.environment == environment], notes or {}))
        seeds = f"IQM and 95% interval over {self._arguments.num_seeds} seeds, {self._score.caption}"
        self.console.print(f"Final return: {seeds}.", soft_wrap=True)
        self.print_files("summary.json", "metrics.jsonl", "learning_curves.png")

    def print_files(self, *names: str) -> None:
        """Prints the names of the files of results, and the size of the policies."""
        size = sum(path.stat().st_size for path in (self.out / POLICIES).rglob("*.safetensors"))
        files = ", ".join([*names, f"policies ({size / 1e6:.1f} MB)"])
        self.console.print(f"Results in {self.out}: {files}", soft_wrap=True)

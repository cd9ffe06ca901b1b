"""The steps that commands and studies share: train, evaluate, record and compare runs."""

import dataclasses
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import tyro
from rich.console import Console
from rich.filesize import decimal

from grpo_jax import Config, TrainState
from grpo_jax.commands.harness.command import DeviceArguments, make_console, mesh_sizes, new_folder
from grpo_jax.commands.harness.figures import Form, print_table, table
from grpo_jax.commands.harness.limits import Count, Seed, Seeds
from grpo_jax.commands.harness.parsing import invocation
from grpo_jax.devices.mesh import make_mesh
from grpo_jax.errors import ConfigError
from grpo_jax.recording.config_file import FIELDS, NotTrustedError, config_fields, from_json
from grpo_jax.recording.figures import plot_settings
from grpo_jax.recording.policy_saver import FOLDER as POLICIES
from grpo_jax.recording.run_folder import Recording
from grpo_jax.recording.statistics import describe_seeds
from grpo_jax.runs.evaluations import Evaluate, reached_return
from grpo_jax.runs.processes import is_process_zero
from grpo_jax.runs.run_spec import RunSpec
from grpo_jax.sweeps import study
from grpo_jax.sweeps.runs import NUM_FINAL, run_keys, sampled_return


@dataclasses.dataclass
class RecordingArguments(Recording):
    """What is recorded of a run; `StudyArguments` has its folder."""

    out: tyro.conf.Suppress[tyro.conf.Fixed[Path | None]] = None

    def __post_init__(self):
        """There is no folder yet."""


@dataclasses.dataclass(frozen=True)
class EvaluationArguments:
    """Evaluations while training, and after it."""

    evaluate_every: int = 0
    """Iterations between two evaluations of the policies, with sampled and with greedy actions; 0 for none."""
    evaluation_episodes: int = 32
    """Episodes of each evaluation."""
    stop_at_return: float | None = None
    """Stop a seed once the return of an evaluation (sampled actions) is at least this."""
    num_final: Count = NUM_FINAL
    """Episodes of the final evaluation of each seed, all played until the longest ends; fewer cost less time."""

    def make(self) -> Evaluate | None:
        """The evaluations; raises ConfigError if there are none for --stop-at-return to decide by."""
        stop_when = None if self.stop_at_return is None else reached_return(self.stop_at_return)
        if self.evaluate_every:
            return Evaluate(self.evaluate_every, self.evaluation_episodes, stop_when)
        if stop_when is not None:
            raise ConfigError("--stop-at-return needs evaluations; set --evaluate-every, such as 10")
        return None


@dataclasses.dataclass(kw_only=True)
class StudyArguments:
    """The flags of every comparison of runs."""

    num_seeds: Seeds = 16
    """Independent runs of each algorithm, in one program."""
    seed: Seed = 0
    """Seed of all randomness."""
    out: Path | None = None
    """Folder for the results; a new one under runs/ if left out."""
    format: Form = "table"
    """What the table of results is printed as."""
    recording: RecordingArguments = dataclasses.field(default_factory=RecordingArguments)
    evaluation: EvaluationArguments = dataclasses.field(default_factory=EvaluationArguments)
    devices: DeviceArguments = dataclasses.field(default_factory=DeviceArguments)

    @property
    def training_keys(self) -> jax.Array:
        """`[num_seeds]`."""
        return run_keys(self.seed, self.num_seeds)[0]

    @property
    def evaluation_keys(self) -> jax.Array:
        """`[num_seeds]`."""
        return run_keys(self.seed, self.num_seeds)[1]


class CommandStudy(study.Study):
    """The runs of one command, by its flags; `name` is that of the folder, if the flags have none."""

    def __init__(self, name: str, plans: list[RunSpec], arguments: StudyArguments, **options: Any):
        self._arguments = arguments
        super().__init__(plans, **study_options(name, arguments) | options)

    def run_all(self, options: Callable[[RunSpec], dict[str, Any]] = lambda plan: {}) -> list[TrainState]:
        """Makes the planned runs, one after the other; returns the trained states of each, `[num_seeds, ...]`.

        `options` gives those of `train` for a plan.
        """
        trained = []
        for plan in self.plans:
            run = self.train(plan, self._arguments.evaluation_keys, **options(plan))
            trained.append(run.result.states)
            self.add(run._replace(result=run.result._replace(states=None)))
        return trained

    def finish(self) -> None:
        """Draws learning_curves.png and prints the tables."""
        env = self.runs[0].config.env
        blocks = {run.setting: run.result for run in self.runs}
        plot_settings(blocks, self.out / "learning_curves.png", over=env.step_word, score=env.words[0])
        for environment in dict.fromkeys(run.environment for run in self.runs):
            runs = [run for run in self.runs if run.environment == environment]
            print_table(self.console, table(runs), self._arguments.format, title=environment)
        seeds = f"{self._score.caption}; {describe_seeds(self._arguments.num_seeds)}"
        self.console.print(f"Final {env.words[0]}: {seeds}.", soft_wrap=True)
        print_files(self.console, self.out, self.runs[0].config, "summary.json", "metrics.jsonl", "learning_curves.png")


def study_options(name: str, arguments: StudyArguments) -> dict[str, Any]:
    """The arguments of `study.Study` from the flags; raises ConfigError if they contradict each other."""
    out, sizes = arguments.out, arguments.devices.mesh
    if arguments.recording.resume and out is None:
        raise ConfigError("--resume needs the folder of the run; name it with --out")
    arguments.recording.check()
    return {
        "recording": dataclasses.replace(arguments.recording, out=out or new_folder(name)),
        "evaluate": arguments.evaluation.make(),
        "mesh": make_mesh(**mesh_sizes(sizes, "--mesh")) if sizes else None,
        "console": make_console(quiet=not is_process_zero(), stderr=arguments.format != "table"),
        "score": sampled_return(arguments.evaluation.num_final),
    }


def print_files(console: Console, out: Path, config: Config, *names: str) -> None:
    """Prints the names of the files of results, the size of the policies, and what to type if these need own code."""
    size = sum(path.stat().st_size for path in (out / POLICIES).rglob("*.npz"))
    policies = [f"policies ({decimal(size)})"] if size else []
    console.print(f"Results in {out}: {', '.join([*names, *policies])}", soft_wrap=True)
    try:
        from_json(out, config_fields(config)[0] if size else {}, FIELDS, "Config")
    except NotTrustedError:
        again = f"{invocation('evaluate')} {shlex.quote(str(out))} --trust"
        console.print(f"The policies need code of yours, which is imported only on request: {again}", soft_wrap=True)

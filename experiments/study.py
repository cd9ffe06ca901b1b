"""What every experiment does with its runs: train, evaluate, record, and show them side by side."""

import dataclasses
import datetime
import errno
import functools
import importlib.metadata
import math
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from rich.table import Column, Table

from experiments.console import make_console
from experiments.devices import DeviceArguments, join_processes, parse_mesh
from experiments.recording import RecordingArguments, StopSignal, Subject, claim, recorded_run
from experiments.settings import SOLVED_AT, settings
from grpo_jax import Config, Hyperparams, TrainState, evaluate
from grpo_jax.algorithms import name_of
from grpo_jax.budget import check_budget
from grpo_jax.errors import ConfigError
from grpo_jax.processes import leads, told_by_the_first
from grpo_jax.results import given_back_if_unused, kept, write_json
from grpo_jax.sharding import mesh_of_rows, over_rows, pad_rows, replicated
from grpo_jax.statistics import Curve, bootstrap_interval, iqm, learning_curve, steps_to_reach
from grpo_jax.training import Progress, RunResult, check_mesh
from grpo_jax.types import PyTree

PROGRAMS = "programs"
OF_THE_DISK = {None, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}  # None: said by our own code
OF_THE_DISK |= {errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG}  # no place for a file
PACKAGES = ("grpo-jax", "jax", "jaxlib", "flax", "optax", "gymnax", "numpy")


class Run(NamedTuple):
    """One algorithm on one environment, all seeds."""

    label: str
    config: Config
    hyperparams: Hyperparams
    result: RunResult
    final_returns: np.ndarray  # [num_seeds]
    wall_seconds: float  # of this process; what a resumed run took before is in the result's `train_seconds` alone
    core_seconds: float  # likewise, of all cores together, also where other processes slow this one down
    warnings: Sequence[str] = ()

    @property
    def environment(self) -> str:
        """Name of the environment."""
        return self.config.env.name

    @property
    def returns(self) -> np.ndarray:
        """`[num_iterations, num_seeds]` mean return of the training episodes that ended."""
        return self.result.metrics["episode/return_mean"]

    @property
    def counts(self) -> np.ndarray:
        """`[num_iterations, num_seeds]` how many training episodes ended."""
        return np.nan_to_num(self.result.metrics["episode/count"])

    @property
    def episodes(self) -> np.ndarray:
        """`[num_iterations, num_seeds]` training episodes that ended so far."""
        return np.cumsum(self.counts, axis=0)

    @property
    def steps_per_second(self) -> float:
        """Environment steps of all seeds in a second of training, compile apart."""
        return float(self.result.steps[-1].sum()) / self.result.train_seconds


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


class Plan(NamedTuple):
    """A run to be made."""

    label: str
    config: Config
    hyperparams: Hyperparams


def make_plan(environment: str, algorithm: str, *, total_steps: int, **fields) -> Plan:
    """A run with the settings that are known to work for this environment and this algorithm, or with other fields."""
    fields = settings(environment, algorithm) | fields
    of_config = {name: value for name, value in fields.items() if name in Config.__dataclass_fields__}
    of_hyperparams = {name: value for name, value in fields.items() if name not in of_config}
    config = Config(environment=environment, algorithm=algorithm, **of_config)
    return Plan(algorithm, config, Hyperparams(total_steps=total_steps, **of_hyperparams))


class Score(NamedTuple):
    """What a trained policy is worth: a run's final return."""

    of: Callable[[Config, TrainState, jax.Array], jax.Array]  # (config, state, key) -> scalar
    caption: str


def sampled_return(num_episodes: int) -> Score:
    """The mean return of that many sampled episodes."""
    return Score(
        lambda config, state, key: evaluate(config, state, key, num_episodes=num_episodes).returns.mean(),
        f"{num_episodes} sampled episodes each",
    )


SAMPLED_RETURN = sampled_return(128)


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
        self.console = make_console(quiet=not leads())
        with given_back_if_unused(self.out):
            told = told_by_the_first(lambda: claim(self.out, self.subjects, arguments, versions(), within=self._within))
        for line in told:
            self.console.print(line, soft_wrap=True)
        if not leads():  # what the other processes of a run write is seen by nobody
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
    num_rows, mesh = len(keys), mesh_of_rows(len(keys)) if mesh is None else mesh
    of_rows = over_rows(lambda row: score.of(config, *row), mesh)

    def of_all(*rows):  # states of several processes come padded
        return of_rows(tuple(pad_rows(each, mesh) for each in rows))

    final_returns = jax.jit(of_all, out_shardings=replicated(mesh))(states, keys)
    return np.asarray(final_returns, np.float64)[:num_rows]


def command(main: Callable[[], None]) -> None:
    """Runs an experiment as a command, on all cores.

    A mistake in its arguments, too little memory and a disk that cannot be written to are one line, not a traceback.
    """
    # A CPU is one device unless told otherwise, and one program seldom keeps more than a core of it busy.
    if jax.config.jax_num_cpu_devices < 0:
        jax.config.update("jax_num_cpu_devices", num_cores())
    try:
        join_processes()
        with given_back_if_unused():
            main()
    except (ConfigError, FileExistsError, MemoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in OF_THE_DISK:
            raise
        there = kept()
        print(f"error: {error}" + (f". What was not written yet is lost; {there}" if there else ""), file=sys.stderr)
        sys.exit(2)
    except StopSignal as stop:
        if leads():
            print(stop.message, file=sys.stderr)
        raise
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def summarise(run: Run) -> dict:
    """What summary.json says of a run."""
    config = {name: getattr(run.config, name) for name in run.config.__dataclass_fields__}
    return {
        "algorithm": run.label,
        "environment": run.environment,
        "num_seeds": len(run.final_returns),
        "environment_steps": run.result.steps[-1].tolist(),
        "final_return": {
            "iqm": iqm(run.final_returns),
            "ci95": bootstrap_interval(run.final_returns),
            "per_seed": run.final_returns,
        },
        "steps_per_second": run.steps_per_second,
        "compile_seconds": run.result.compile_seconds,
        "wall_seconds": run.wall_seconds,
        "core_seconds": run.core_seconds,
        "warnings": run.warnings,
        "skipped_updates": int(np.nansum(run.result.metrics["optim/skipped_updates"])),
        "config": config | {"environment": run.environment, "algorithm": name_of(run.config.algorithm)},
        "hyperparams": {name: getattr(run.hyperparams, name) for name in run.hyperparams.__dataclass_fields__},
    }


def solved_after(run: Run) -> float:
    """Median over seeds of the steps until the training return, averaged over 2% of the budget, is a solved task's.

    An iteration of one-episode groups alone is often more than 2%.
    """
    budget = float(run.hyperparams.total_steps)
    budget = budget if math.isfinite(budget) else float(run.result.steps.max())
    window = max(1, round(0.02 * budget / run.config.steps_per_iteration))
    return float(np.median(steps_to_reach(run.result.steps, run.returns, SOLVED_AT[run.environment], window=window)))


def table(runs: list[Run], notes: Mapping[str, str]) -> Table:
    """The runs on one environment side by side."""
    environment = runs[0].environment
    columns = [Column("run", overflow="fold"), "final return", "worst seed", "steps a seed"]
    if environment in SOLVED_AT:
        columns.append(f"steps to {SOLVED_AT[environment]:g}")
    caption = "\n".join(f"{run.label}: {notes[run.label]}" for run in runs if run.label in notes)
    rendered = Table(*columns, "train", "compile", "wall", "steps/s", title=environment, caption=caption or None)
    for run in runs:
        low, high = bootstrap_interval(run.final_returns)
        row = [
            run.label,
            f"{iqm(run.final_returns):.4g} [{low:.4g}, {high:.4g}]",
            f"{run.final_returns.min():.4g}",
            f"{run.result.steps[-1].mean():,.0f}",
        ]
        if environment in SOLVED_AT:
            solved = solved_after(run)
            row.append(f"{solved:,.0f}" if np.isfinite(solved) else "not reached")
        row += [f"{run.result.train_seconds:.0f} s", f"{run.result.compile_seconds:.0f} s"]
        row.append(f"{run.wall_seconds:.0f} s")
        rendered.add_row(*row, f"{run.steps_per_second:,.0f}")
    return rendered


def plot_curves(runs: list[Run], path: Path, over: str) -> None:
    """One panel for each environment: IQM over seeds with its 95% band, over "environment steps" or "episodes"."""
    panels: dict[str, dict[str, Curve]] = {run.environment: {} for run in runs}
    for run in runs:
        if not np.isnan(run.returns).all():
            made = run.result.steps if over == "environment steps" else run.episodes
            panels[run.environment][run.label] = learning_curve(made, run.returns, run.counts)
    draw_curves(panels, path, over, len(runs[0].final_returns))


def draw_curves(panels: Mapping[str, Mapping[str, Curve]], path: Path, over: str, num_seeds: int) -> None:
    """The curves of each environment, by their labels, in a panel."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = list(dict.fromkeys(label for curves in panels.values() for label in curves))
    columns = min(5, len(panels))
    rows = -(-len(panels) // columns)
    width, dpi = (6.4, 150) if columns < 4 else (4.8, 90)
    size = (width * columns, 0.66 * width * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for (environment, curves), axis in zip(panels.items(), axes.flat, strict=False):
        for label, curve in curves.items():
            color = f"C{labels.index(label)}"
            axis.plot(curve.steps, curve.mean, color=color, label=label)
            axis.fill_between(curve.steps, curve.low, curve.high, color=color, alpha=0.2, linewidth=0)
        if environment in SOLVED_AT:
            axis.axhline(SOLVED_AT[environment], color="0.6", linestyle="--", linewidth=0.8, zorder=0)
        axis.set(title=environment, xlabel=f"{over} (each seed)", ylabel="return of training episodes")
        axis.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
        axis.spines[["top", "right"]].set_visible(False)
        if len(curves) > 6:  # they would hide what they explain
            axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
        else:
            axis.legend(frameon=False, loc="lower right")
    figure.suptitle(f"IQM of {num_seeds} seeds, 95% bootstrap interval", fontsize="small", color="0.4")
    figure.savefig(path, dpi=dpi)
    plt.close(figure)


def versions() -> dict[str, str]:
    """Of Python and of the packages that a result depends on."""

    def version(name: str) -> str:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}


def num_cores() -> int:
    """Of the host, that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hardware() -> str:
    """The accelerators JAX sees, and the host."""
    devices = jax.devices()
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    return f"{len(devices)} × {devices[0].device_kind}; host {cpu}, {os.cpu_count()} cores"

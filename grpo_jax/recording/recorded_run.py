"""What a run of hours needs around it: a record, trackers, checkpoints, alarms, and signals that lose nothing."""

import contextlib
import dataclasses
import functools
import math
import re
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from grpo_jax.config.config import Config
from grpo_jax.devices.processes import from_every_process, from_process_zero, is_process_zero
from grpo_jax.errors import ConfigError
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.recording.alarms import Alarms
from grpo_jax.recording.files import (
    METRICS_FILE,
    SUMMARY_FILE,
    Record,
    claim_directory,
    given_back_if_unused,
    part_of_record,
    read_record,
)
from grpo_jax.recording.logbook import Logbook
from grpo_jax.recording.nan_finder import NonFiniteFinder
from grpo_jax.recording.signals import waiting_signals
from grpo_jax.recording.trackers import TensorBoard, WeightsAndBiases, check_installed
from grpo_jax.training.budget import most_steps
from grpo_jax.training.run import Progress, RunResult, initial_states, run
from grpo_jax.types import PyTree

NUM_CHUNKS = 50  # of a run, if its checkpoints are not closer together


@dataclasses.dataclass
class RecordingArguments:
    """How a run is kept and watched, from the command line."""

    checkpoint_every: int = 0
    """Iterations between two checkpoints, from which --resume goes on; 0 for none."""
    resume: bool = False
    """Go on with the run in --out, or begin it if there is none."""
    tensorboard: bool = False
    """Also write TensorBoard's event files."""
    wandb: Literal["offline", "online"] | None = None
    """Also log to Weights & Biases."""
    debug_nans: bool = False
    """Stop at the first loss or gradient that is not finite, and show the operation it comes from; slow."""

    def check(self, out: Path | None) -> None:
        """Raises ConfigError for what does not go together, before anything is written or computed."""
        if self.checkpoint_every < 0:
            raise ConfigError(f"checkpoint_every={self.checkpoint_every} is not a number of iterations; 0 is for none")
        if self.resume and out is None:
            raise ConfigError("--resume goes on with the run in a folder; name it with --out")
        if self.resume and self.checkpoint_every == 0:
            raise ConfigError("--resume goes on from checkpoints; write --checkpoint-every N beside it, such as 100")
        if self.wandb is not None:
            check_installed("wandb")


class Subject(NamedTuple):
    """A run to be made and recorded, of `R` rows."""

    name: str
    config: Config
    hyperparams: Hyperparams  # each leaf scalar or [R]
    keys: jax.Array  # [R]
    max_episodes: float = math.inf

    @property
    def folder(self) -> str:
        """Where its checkpoints are, below those of the experiment."""
        return re.sub(r"[^\w.()-]+", "_", self.name)

    def about(self) -> dict[str, Any]:
        """What makes it this run and no other, in JSON's types."""
        from grpo_jax.recording.checkpoint import describe

        return {
            "name": self.name,
            "config": describe(self.config),
            "hyperparams": {
                field.name: np.asarray(getattr(self.hyperparams, field.name)).tolist()
                for field in dataclasses.fields(self.hyperparams)
            },
            "keys": np.asarray(jax.random.key_data(self.keys)).tolist(),
            "max_episodes": self.max_episodes,
        }


def claim(
    out: Path,
    subjects: list[Subject],
    arguments: RecordingArguments,
    versions: Mapping[str, str],
    *,
    within: str = "",
) -> list[str]:
    """Makes `out` the folder of this process; what is there already must be checkpoints of these very runs.

    `within` is the folder in it where the runs are recorded, itself if empty. Returns what to tell the user.
    """
    records = out / within
    if not arguments.resume:
        for folder in dict.fromkeys((out, records)):
            claim_directory(folder)
        return []
    metrics = out / METRICS_FILE
    begun = (out / SUMMARY_FILE).exists() or (metrics.exists() and metrics.stat().st_size > 0)
    if begun and not (records / "checkpoints").is_dir():
        raise FileExistsError(
            f"{out} holds a run without checkpoints, so it cannot be resumed. Nothing was written. Choose another "
            "folder (--out), or move the old one away."
        )
    for folder in (out, records):
        claim_directory(folder, resume=True)
    from grpo_jax.recording.checkpoint import check_same_run

    folders = {subject.folder for subject in subjects}
    for folder in sorted(path.name for path in (records / "checkpoints").glob("*")):
        if folder not in folders:
            raise ConfigError(
                f"{out} holds the run {folder!r}, which is none of {', '.join(map(repr, sorted(folders)))}; to resume, "
                "write what it was started with, or choose another folder (--out) for a new run"
            )
    told = []
    for subject in subjects:
        saved = check_same_run(records / "checkpoints" / subject.folder, subject.about())
        for package, version in (saved or {}).items():
            if version != versions.get(package):
                told.append(
                    f"{subject.name}: {package} was {version} so far, and is {versions.get(package)} now: "
                    "the last bits of its numbers may be others."
                )
    return list(dict.fromkeys(told))


def recorded_run(
    subject: Subject,
    out: Path,
    arguments: RecordingArguments,
    *,
    versions: Mapping[str, str],
    console: bool | Console = True,
    params: PyTree = None,
    watch: Callable[[Progress], None] | None = None,
    mesh: Mesh | None = None,
    within: str = "",
) -> tuple[RunResult, list[str]]:
    """Makes a run, or the rest of it; returns the whole, and what the alarms warned of.

    `params` are those that its policies begin with, `watch` is called with where the run stands, as `run` calls `save`,
    and `within` is as in `claim`.

    With checkpoints, SIGTERM and Ctrl-C end all processes after the chunk under way, which is saved; a second Ctrl-C
    this one at once.
    """
    name, config, hyperparams, keys, max_episodes = subject
    records = out / within
    total_steps = most_steps(config, hyperparams, max_episodes)
    num_iterations = total_steps // config.steps_per_iteration
    start, past, checkpoints, num_chunks = None, None, None, NUM_CHUNKS
    with given_back_if_unused(out), contextlib.ExitStack() as stack:
        came = []
        if arguments.checkpoint_every:
            from grpo_jax.recording.checkpoint import Checkpoints

            num_chunks = max(num_chunks, math.ceil(num_iterations / arguments.checkpoint_every))
            came = stack.enter_context(waiting_signals())
            checkpoints = stack.enter_context(
                Checkpoints(
                    part_of_record(records / "checkpoints") / subject.folder,
                    subject.about(),
                    notes=versions,
                    every=arguments.checkpoint_every,
                )
            )
        if arguments.resume:
            past = from_process_zero(lambda: read_record(records, name))
            like = jax.eval_shape(functools.partial(initial_states, config), hyperparams, keys)
            start = checkpoints.restore(like, at_most=len(past.steps))
            past = past.until(start.iteration, start.seconds) if start else past.until(0)
        logbook = stack.enter_context(
            Logbook(
                records,
                run=name,
                total_steps=total_steps,
                num_seeds=len(keys),
                console=console,
                past=past,
                alarms=Alarms(config.env.action_space),
                trackers=_trackers(subject, records, arguments, start),
            )
        )
        finder = NonFiniteFinder(config) if arguments.debug_nans else None
        if finder is not None:
            num_chunks = num_iterations

        def report(chunk):
            logbook.record(chunk)
            if finder is not None:
                finder.check(chunk)

        def save(progress):
            if watch is not None:
                watch(progress)
            if finder is not None:
                finder.remember(progress)
            if checkpoints is not None:
                checkpoints.update(progress, logbook.typical_return)
                # All processes stop together, whichever of them the signal came to.
                if number := from_every_process(came[0] if came else 0).max():
                    checkpoints.save(progress, logbook.typical_return)
                    raise StopSignal(int(number), out)

        result = run(
            config,
            hyperparams,
            keys,
            params=params,
            max_episodes=max_episodes,
            resume_from=start,
            report=report,
            save=save,
            num_chunks=num_chunks,
            mesh=mesh,
        )
    return _whole(past, result), logbook.warnings


def _whole(past: Record | None, result: RunResult) -> RunResult:
    """With the iterations that an earlier process made."""
    if past is None or not len(past.steps):
        return result
    if not len(result.steps):
        return result._replace(metrics=past.metrics, steps=past.steps)
    metrics = {name: np.concatenate([values, result.metrics[name]]) for name, values in past.metrics.items()}
    return result._replace(metrics=metrics, steps=np.concatenate([past.steps, result.steps]))


class StopSignal(SystemExit):
    """A run that a signal ended between two chunks, all of it saved; exits with what shells have for that signal."""

    def __init__(self, number: int, out: Path):
        super().__init__(128 + number)
        self.message = f"{signal.Signals(number).name}: saved. To go on, repeat the command with --resume --out {out}"


def _trackers(subject: Subject, out: Path, arguments: RecordingArguments, start: Progress | None) -> list:
    trackers = []
    if not is_process_zero():
        return trackers
    if arguments.tensorboard:
        first_step = 0 if start is None else int(np.median(start.steps)) + 1
        trackers.append(TensorBoard(part_of_record(out / "tensorboard") / subject.folder, first_step=first_step))
    if arguments.wandb is not None:
        part_of_record(out / "wandb")
        trackers.append(WeightsAndBiases(out, run=subject.name, mode=arguments.wandb, config=subject.about()))
    return trackers

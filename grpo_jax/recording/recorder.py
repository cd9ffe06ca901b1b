"""`recorded_run`: a run with metrics, checkpoints, trackers and warnings, which can be resumed."""

import contextlib
import dataclasses
import functools
import logging
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from grpo_jax.algorithms import name_of
from grpo_jax.config import Config
from grpo_jax.environments import EnvParams
from grpo_jax.errors import ConfigError, check_arguments, user_code
from grpo_jax.hyperparams import Hyperparams, completed
from grpo_jax.policies import partition
from grpo_jax.recording.figures import plot_settings, ranked_settings
from grpo_jax.recording.metrics_file import read_metrics
from grpo_jax.recording.metrics_logger import MetricsLogger
from grpo_jax.recording.policy_saver import PolicySaver
from grpo_jax.recording.run_folder import (
    CHECKPOINTS,
    Recording,
    StopSignal,
    deferred_signals,
    describe_run,
    prepare_folder,
)
from grpo_jax.recording.trackers import TensorBoard, WeightsAndBiases
from grpo_jax.runs.end_warnings import end_warnings
from grpo_jax.runs.evaluations import Evaluate, Evaluations
from grpo_jax.runs.processes import from_every_process, from_process_zero, is_process_zero
from grpo_jax.runs.progress import Callback, Chunk, Progress, apply_callback
from grpo_jax.runs.result import RunResult, describe_ends, final_return, joined
from grpo_jax.runs.run import NUM_CHUNKS, Rows
from grpo_jax.runs.run_spec import RunSpec
from grpo_jax.training.budget import most_steps
from grpo_jax.training.checks import check_options, check_read, check_rows, check_run, makes_params
from grpo_jax.training.train import initial_states
from grpo_jax.types import PyTree, by_path

NO_ITERATIONS = Chunk(metrics={}, steps=np.zeros((0, 0), np.int64), iteration=0, seconds=0.0)

SECONDS = 60.0
"""Between two checkpoints, if no number of iterations is given."""
LARGE = 2**26
"""Bytes of given parameters that are trained, beyond which only the latest checkpoint is kept."""

OPTIONS = {"evaluate", "callback", "params", "normalizer", "mesh"}
"""The arguments of `run` that `recorded_run` passes on."""

_log = logging.getLogger(__name__)


def recorded_run(
    config: Config,
    hyperparams: Hyperparams,
    keys: jax.Array,
    recording: Recording | str | Path,
    *,
    env_params: EnvParams = None,
    console: bool | Console = True,
    **options: Any,
) -> RunResult:
    """Trains as `run` does, and records the run in a folder, from which it can be resumed after an interruption.

    ```python
    import jax

    from grpo_jax import Config, Hyperparams, Recording, recorded_run

    config = Config(environment="CartPole-v1", algorithm="grpo")
    keys = jax.random.split(jax.random.key(0), 4)
    recording = Recording("runs/mine", checkpoint_every=100, resume=True)
    result = recorded_run(config, Hyperparams(total_steps=200_000), keys, recording)
    ```

    The folder gets `metrics.jsonl` (a JSON object an iteration), `policies/` (the latest and the best policy of each
    row, for `grpo_jax.load`), `checkpoints/` (the latest two), the files of the trackers, and at the end
    `learning_curves.png`.
    The console shows the progress, and warnings, such as of a collapsed entropy. Rows that differ in their
    hyperparameters or `env_params` are different settings in all of these, others are seeds.

    A run that is interrupted and then resumed on the same devices ends bitwise as one without the interruption, if a
    callback depends only on the progress and the chunk. Unless `checkpoint_every` is 0, SIGTERM and Ctrl-C end the
    process after the current chunk of iterations, which is saved. All processes of a run on several hosts make the same
    call; process 0 writes and prints.

    Args:
      config, hyperparams, keys, env_params: see `run`.
      recording: `Recording(folder, ...)`, or the folder alone.
      console: False shows nothing; True uses standard output; or a rich `Console`.
      options: `evaluate`, `callback`, `params`, `normalizer` and `mesh` of `run`. The latest return of an evaluation,
        or else of training, decides which policy is the best one.

    Returns:
      The result of the whole run, with the metrics and steps of all its iterations, also those made before it was
      interrupted.

    Raises:
      FileExistsError: the folder contains results and `resume` is False, or another process writes to it.
      ConfigError: the arguments contradict each other, or the folder contains another run.
      StopSignal: a SystemExit, after SIGTERM or Ctrl-C; the run was saved.
      MemoryError, OSError: there is too little memory, or the folder cannot be written to.
    """
    recording = as_recording(recording)
    check_known("recorded_run", options, OPTIONS)
    recording.check()
    check_run(config, hyperparams)
    check_read((config, hyperparams))
    hyperparams = completed(hyperparams, config.hyperparams_class)
    check_rows(hyperparams, keys)
    check_options(config, hyperparams, **{name: options.get(name) for name in ("params", "callback", "mesh")})
    spec, out = RunSpec(name_of(config.algorithm), config, hyperparams, keys, env_params), recording.out
    from_process_zero(lambda: prepare_folder(out, [spec], resume=recording.resume))
    try:
        result, _ = record(spec, recording, console=console, **options)
    except StopSignal as stop:
        if is_process_zero():
            _log.warning("%s: saved in %s; resume it with Recording(..., resume=True)", stop.name, stop.folder)
        raise
    if is_process_zero() and len(result.steps):
        plot_settings(ranked_settings(result, config.env.name), out / "learning_curves.png")
    return result


def as_recording(recording: Recording | str | Path) -> Recording:
    """The recording, of a folder alone too; raises ConfigError for anything else."""
    return recording if isinstance(recording, Recording) else Recording(recording)


def check_known(function: str, options: Mapping[str, Any], known: set[str]) -> None:
    """Raises ConfigError for an argument that the function does not have, also if it is a field of `Recording`."""
    for name in options.keys() - known:
        if name in Recording.__dataclass_fields__:
            raise ConfigError(f"{name} is a field of the recording: Recording(folder, {name}={options[name]!r})")
    check_arguments(function, options, known)


def record(
    spec: RunSpec,
    recording: Recording,
    *,
    evaluate: Evaluate | None = None,
    callback: Callback | None = None,
    params: PyTree | Callable[[], PyTree] = None,
    console: bool | Console = True,
    **options: Any,
) -> tuple[RunResult, list[str]]:
    """Makes a run, or the rest of it, in a prepared folder; returns the result of the whole run, and the warnings.

    Args:
      spec, recording: the run, and how it is recorded.
      evaluate, callback, params, options: see `run`.
      console: see `recorded_run`; other processes than process 0 print nothing.
    """
    with Recorder(spec, recording, evaluate is not None, callback, console, params) as recorder:
        rows = Rows(
            *(spec.config, spec.hyperparams, spec.keys),
            env_params=spec.env_params,
            params=recorder.take_params if makes_params(params) else params,
            resume_from=recorder.start,
            evaluate=evaluate,
            callback=recorder,
            chunk_length=recorder.chunk_length,
            say=recorder.logger.say,
            **options,
        )
        return recorder.finish(rows.run()), recorder.logger.warnings


@dataclasses.dataclass
class Recorder:
    """The callback of a run that records it: metrics, policies and checkpoints, after the user's callback.

    Attributes:
      start: the checkpoint to go on from; None for the beginning.
      chunk_length: of the run; None if any will do.
      logger: writes the metrics.
    """

    spec: RunSpec
    recording: Recording
    is_evaluated: bool
    callback: Callback | None
    console: bool | Console
    params: PyTree | Callable[[], PyTree]
    start: Progress | None = None
    chunk_length: int | None = None

    def __enter__(self) -> "Recorder":
        spec, recording = self.spec, self.recording
        self._checkpoints, self._policies, self._received, self._past = None, None, None, None
        self._checksums, self._is_large, self._last = {}, False, None
        self._due_at = time.monotonic() + SECONDS
        with contextlib.ExitStack() as stack:
            if recording.checkpoint_every:
                num_iterations = most_steps(spec.config, spec.hyperparams) // spec.config.steps_per_iteration
                self.chunk_length = min(recording.checkpoint_every, -(-num_iterations // NUM_CHUNKS))
            if recording.checkpoint_every != 0:
                self._received = stack.enter_context(deferred_signals())
            if makes_params(self.params):
                self.params = self.params()
            if recording.checkpoint_every != 0:
                self._checksums = {path: zlib.crc32(leaf) for path, leaf in self._frozen().items()}
            if recording.checkpoint_every or recording.resume:
                self._open_checkpoints(stack)
            if recording.resume:
                self._resume()
            if recording.policies:
                is_begun = self.start is not None and self.start.iteration > 0
                self._policies = PolicySaver(recording.out, spec, resume=is_begun)
            self._chunks = [] if self._past is None else [self._past]
            self.logger = stack.enter_context(self._make_logger())
            self._closing = stack.pop_all()
        return self

    def __exit__(self, *exception) -> None:
        self._closing.__exit__(*exception)

    def _open_checkpoints(self, stack: contextlib.ExitStack) -> None:
        from grpo_jax.recording.checkpoint import KEPT, Checkpoints  # only here, as orbax takes a second

        folder = self.recording.out / CHECKPOINTS / self.spec.setting.folder
        saver = Checkpoints(folder, describe_run(self.spec), given=self._checksums, kept=1 if self._is_large else KEPT)
        self._checkpoints = stack.enter_context(saver)

    def _frozen(self) -> dict[str, np.ndarray]:
        """The given parameters by the paths of the states that keep them as they are: checkpoints do not hold them."""
        if self.params is None:
            return {}
        trained, frozen = partition(self.spec.config.policy, self.params)
        self._is_large = sum(leaf.nbytes for leaf in jax.tree.leaves(trained)) > LARGE
        kept = by_path({"params": frozen})
        if self.spec.config.algorithm.reference is not None:
            kept |= by_path({"reference_params": trained})
        return {path: np.asarray(leaf) for path, leaf in kept.items()}

    def take_params(self) -> PyTree:
        """The parameters to start from, which nothing here keeps any longer."""
        params, self.params = self.params, None
        return params

    def _resume(self) -> None:
        """Finds the checkpoint to go on from, and the recorded iterations before it."""
        spec = self.spec
        recorded = from_process_zero(lambda: read_metrics(self.recording.out).get(spec.setting, NO_ITERATIONS))
        initial = functools.partial(initial_states, spec.config)
        like = jax.eval_shape(initial, spec.hyperparams, spec.keys, spec.env_params, self.params)
        self.start = self._checkpoints.restore(like, at_most=len(recorded.steps), given=self._frozen())
        iteration, seconds = 0, 0.0
        if self.start is not None:
            self.params, iteration, seconds = None, self.start.iteration, self.start.seconds
        metrics = {name: values[:iteration] for name, values in recorded.metrics.items()}
        self._past = Chunk(metrics, recorded.steps[:iteration], iteration=0, seconds=seconds)

    def _make_logger(self) -> MetricsLogger:
        """Process 0 alone writes, prints and has trackers."""
        spec, recording, out = self.spec, self.recording, self.recording.out
        if not is_process_zero():
            return MetricsLogger(None, spec, console=False, past=self._past)
        trackers, steps = [], None if self.start is None else self.start.steps
        with user_code("a tracker cannot begin", "; leave it out, or of Weights & Biases use the mode offline"):
            if recording.tensorboard:
                trackers.append(TensorBoard(out / "tensorboard" / spec.setting.folder, spec, steps))
            if recording.wandb is not None:
                group = recording.wandb_group or (out.resolve().name if len(spec.settings.rows) > 1 else None)
                trackers.append(WeightsAndBiases(out, spec, mode=recording.wandb, group=group))
        return MetricsLogger(out, spec, console=self.console, past=self._past, trackers=trackers)

    def _scores(self, evaluations: Evaluations) -> np.ndarray:
        """Returns of the latest evaluation, or of recent training episodes in a run without evaluations."""
        is_known = self.is_evaluated and len(evaluations.steps) > 0
        return evaluations.sampled[-1] if is_known else final_return(self._chunks, len(self.spec.keys))

    def __call__(self, progress: Progress, chunk: Chunk | None) -> Progress | None:
        """Records the chunk, and the states after it; raises StopSignal after a signal, once they are saved."""
        if chunk is not None:
            self.logger.record(chunk, np.where(progress.ended, 1.0, progress.used))
            self._chunks.append(chunk)
        is_scored = not self.is_evaluated or progress.iteration in progress.evaluations.iterations
        if self._policies is not None and is_scored:
            self._policies.update(progress.states, progress.steps, self._scores(progress.evaluations))
        changed = apply_callback(self.callback, progress, chunk)
        if self._received is not None:
            # All processes stop together, whichever of them received the signal.
            signal = int(from_every_process(self._received[0] if self._received else 0).max())
            self._checkpoint(changed, is_last=signal > 0)
            if signal:
                raise StopSignal(signal, self.recording.out)
        return None if changed is progress else changed

    def _checkpoint(self, progress: Progress, *, is_last: bool) -> None:
        """Saves the states if a checkpoint is due, or this is the last chance."""
        self._last, every = progress, self.recording.checkpoint_every
        if every is None:
            is_due = from_process_zero(lambda: time.monotonic() >= self._due_at)
        else:
            is_due = progress.iteration // every > max(self._checkpoints.saved_at, 0) // every
        if is_due or is_last:
            if self._policies is not None:  # first: a run that goes on from the checkpoint needs the best before it
                self._policies.save(progress.states, progress.steps, self._scores(progress.evaluations))
            if self._checkpoints is None:
                self._open_checkpoints(self._closing)
            self._checkpoints.save(progress)
            self._due_at = time.monotonic() + SECONDS

    def finish(self, result: RunResult) -> RunResult:
        """Writes what belongs to the end of a run; returns the result with the iterations before an interruption."""
        num_rows = len(self.spec.keys)
        self.logger.ending = describe_ends(result.ended_by, result.used, self.spec.settings.word)
        metrics, steps = joined([result] if self._past is None else [self._past, result], num_rows)
        made = steps[-1] if len(steps) else np.zeros(num_rows, np.int64)
        if self._policies is not None:
            self._policies.save(result.states, made, self._scores(result.evaluations))
        if self._checkpoints is not None:
            self._checkpoints.save(self._last)
        result = result._replace(metrics=metrics, steps=steps)
        found = end_warnings(self.spec.config, self.spec.hyperparams, result)
        self.logger.warn(*(text for kind, text in found.items() if kind != "skipped"))  # which was said at once
        return result

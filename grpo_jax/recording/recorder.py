"""`recorded_run`: a run with metrics, checkpoints, trackers and warnings, which can be resumed."""

import contextlib
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from grpo_jax.algorithms import name_of
from grpo_jax.config import Config
from grpo_jax.devices.processes import from_every_process, from_process_zero, is_process_zero
from grpo_jax.environments import EnvParams
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.recording.alarms import Alarms
from grpo_jax.recording.claims import release_if_unused, remove_if_unused
from grpo_jax.recording.figures import plot_run
from grpo_jax.recording.files import read_metrics
from grpo_jax.recording.logbook import Logbook
from grpo_jax.recording.nan_finder import NonFiniteFinder
from grpo_jax.recording.plan import Plan, claim, versions
from grpo_jax.recording.policies import KeptPolicies, RecentReturns
from grpo_jax.recording.settings import Recording
from grpo_jax.recording.signals import StopSignal, deferred_signals
from grpo_jax.recording.trackers import TensorBoard, Tracker, WeightsAndBiases
from grpo_jax.training.budget import most_steps
from grpo_jax.training.checks import check_run
from grpo_jax.training.evaluations import Evaluations
from grpo_jax.training.progress import Chunk, Progress, RunResult, apply_callback, describe_ends, joined
from grpo_jax.training.run import NUM_CHUNKS, check_evaluations, check_keys, initial_states, run
from grpo_jax.types import PyTree

if TYPE_CHECKING:  # orbax is imported where a run has checkpoints
    from grpo_jax.recording.checkpoint import Checkpoints

NO_ITERATIONS = Chunk(metrics={}, steps=np.zeros((0, 0), np.int64), iteration=0, seconds=0.0)

_log = logging.getLogger(__name__)


def recorded_run(
    config: Config,
    hyperparams: Hyperparams,
    keys: jax.Array,
    directory: str | Path,
    *,
    checkpoint_every: int = 100,
    resume: bool = False,
    tensorboard: bool = False,
    wandb: Literal["offline", "online"] | None = None,
    debug_nans: bool = False,
    evaluate_every: int = 0,
    evaluation_episodes: int = 32,
    stop_when: Callable[[Evaluations], np.ndarray] | None = None,
    callback: Callable[[Progress, Chunk | None], Progress | None] | None = None,
    console: bool | Console = True,
    env_params: EnvParams = None,
    params: PyTree = None,
    mesh: Mesh | None = None,
) -> RunResult:
    """Trains as `run` does, and records the run in a folder, from which it can be resumed after an interruption.

    ```python
    import jax

    from grpo_jax import Config, Hyperparams, recorded_run

    config = Config(environment="CartPole-v1", algorithm="grpo")
    keys = jax.random.split(jax.random.key(0), 4)
    result = recorded_run(config, Hyperparams(total_steps=200_000), keys, "runs/mine", resume=True)
    ```

    The folder gets `metrics.jsonl` (a JSON object an iteration), `policies/` (the final and the best policy of each
    row, for `grpo_jax.load`), `checkpoints/` (the latest two and the best one), the files of the trackers, and at the
    end `learning_curves.png`. The console shows the progress, and warnings, such as of a collapsed entropy. Rows that
    differ in their hyperparameters or `env_params` are different settings in all of these, others are seeds.

    A run that is interrupted and then resumed on the same devices ends bitwise as one without the interruption.
    With checkpoints, SIGTERM and Ctrl-C end the process after the current chunk of iterations, which is saved; a second
    Ctrl-C ends it at once. All processes of a run on several hosts make the same call; process 0 writes and prints.

    Args:
      config, hyperparams, keys: see `run`.
      directory: the folder for the results, created if it does not exist. It is locked until the process ends.
      checkpoint_every: iterations between two checkpoints; 0 for none.
      resume: resume the run in the folder, or begin it if there is none. The other arguments must be the same.
      tensorboard: also write TensorBoard's event files.
      wandb: also log to Weights & Biases, "online" or "offline".
      debug_nans: stop at the first loss or gradient that is not finite, and show the operation it comes from; slow.
      evaluate_every, evaluation_episodes, stop_when, callback: see `run`; the latest return of an evaluation decides
        which checkpoint is the best one. A run goes on exactly after an interruption if a callback depends only on the
        progress and the chunk.
      console: False shows nothing; True uses standard output; or a rich `Console`.
      env_params, params, mesh: see `run`.

    Returns:
      The result of the whole run, with the metrics and steps of all its iterations, also those made before it was
      interrupted.

    Raises:
      FileExistsError: the folder contains results and `resume` is False, or another process writes to it.
      ConfigError: the arguments contradict each other, or the folder contains another run.
      FloatingPointError: with `debug_nans`, a loss or a gradient was not finite.
      StopSignal: a SystemExit, after SIGTERM or Ctrl-C; the run was saved.
      MemoryError, OSError: there is too little memory, or the folder cannot be written to.
    """
    directory = Path(directory)
    recording = Recording(
        checkpoint_every=checkpoint_every,
        resume=resume,
        tensorboard=tensorboard,
        wandb=wandb,
        debug_nans=debug_nans,
        evaluate_every=evaluate_every,
        evaluation_episodes=evaluation_episodes,
    )
    recording.check()
    check_evaluations(evaluate_every, evaluation_episodes, stop_when)
    check_run(config, hyperparams)
    check_keys(keys)
    plan = Plan(name_of(config.algorithm), config, hyperparams, keys, env_params)
    with release_if_unused(directory):
        from_process_zero(lambda: claim(directory, [plan], resume=resume))
        try:
            result, _ = record(
                *(plan, directory, recording),
                stop_when=stop_when,
                callback=callback,
                console=console,
                params=params,
                mesh=mesh,
            )
        except StopSignal as stop:
            if is_process_zero():
                _log.warning("%s: saved in %s; resume it with recorded_run(..., resume=True)", stop.name, directory)
            raise
    if is_process_zero() and len(result.steps):
        plot_run(config.env.name, plan.settings, result, remove_if_unused(directory / "learning_curves.png"))
    return result


def record(
    plan: Plan,
    directory: Path,
    recording: Recording,
    *,
    console: bool | Console = True,
    params: PyTree = None,
    stop_when: Callable[[Evaluations], np.ndarray] | None = None,
    callback: Callable[[Progress, Chunk | None], Progress | None] | None = None,
    mesh: Mesh | None = None,
) -> tuple[RunResult, list[str]]:
    """Makes a run, or the rest of it, in a claimed folder; returns the result of the whole run, and the warnings.

    Args:
      plan: the run.
      directory: its folder.
      recording: how it is recorded.
      console: see `Logbook`; other processes than process 0 print nothing.
      params, stop_when, callback, mesh: see `run`.
    """
    config, hyperparams = plan.config, plan.hyperparams
    num_iterations = most_steps(config, hyperparams) // config.steps_per_iteration
    start, past, checkpoints, received, chunk_length = None, None, None, [], None
    with contextlib.ExitStack() as stack:
        if recording.checkpoint_every:
            from grpo_jax.recording.checkpoint import Checkpoints

            chunk_length = min(recording.checkpoint_every, -(-num_iterations // NUM_CHUNKS))
            folder = remove_if_unused(directory / "checkpoints") / plan.folder
            received = stack.enter_context(deferred_signals())
            checkpoints = stack.enter_context(
                Checkpoints(folder, plan.describe(), notes=versions(), every=recording.checkpoint_every)
            )
        if recording.resume:
            start, past = _resume(plan, directory, checkpoints, params)
        policies = stack.enter_context(KeptPolicies(directory, plan, resume=start is not None and start.iteration > 0))
        recent = RecentReturns(len(plan.keys), past)
        logbook = stack.enter_context(_logbook(plan, directory, recording, console, past, start))
        finder = NonFiniteFinder(config) if recording.debug_nans else None

        def scores(evaluations):
            """Returns of the latest evaluation, or of recent training episodes in a run without evaluations."""
            is_evaluated = recording.evaluate_every and len(evaluations.iterations)
            return evaluations.sampled[-1] if is_evaluated else recent.scores

        num_evaluations = 0

        def called(progress, chunk):
            nonlocal num_evaluations
            num_evaluations = len(progress.evaluations.iterations)
            if chunk is not None:
                logbook.record(chunk, np.where(progress.ended, 1.0, progress.used))
                recent.add(chunk)
                if finder is not None:
                    finder.check(chunk)
            if not recording.evaluate_every or progress.iteration in progress.evaluations.iterations:
                policies.update(progress, scores(progress.evaluations))
            before, progress = progress, apply_callback(callback, progress, chunk)
            if finder is not None:
                finder.remember(progress)
            if checkpoints is not None:
                if checkpoints.is_due(progress):
                    policies.save()  # first: a run that goes on from the checkpoint needs the best ones before it
                checkpoints.update(progress, logbook.typical_return)
                # All processes stop together, whichever of them received the signal.
                if number := from_every_process(received[0] if received else 0).max():
                    policies.save()
                    checkpoints.save(progress, logbook.typical_return)
                    raise StopSignal(int(number))
            return None if progress is before else progress

        result = run(
            config,
            hyperparams,
            plan.keys,
            env_params=plan.env_params,
            params=params,
            resume_from=start,
            callback=called,
            chunk_length=chunk_length if finder is None else 1,
            evaluate_every=recording.evaluate_every,
            evaluation_episodes=recording.evaluation_episodes,
            stop_when=stop_when,
            mesh=mesh,
        )
        if len(result.evaluations.iterations) > num_evaluations:  # one after the callback had ended the run
            logbook.complete(result.metrics)
        logbook.ending = describe_ends(result.ended_by, result.used, plan.settings.word)
        metrics, steps = joined([result] if past is None else [past, result], len(plan.keys))
        made = steps[-1] if len(steps) else np.zeros(len(plan.keys), np.int64)
        policies.finish(result.states, made, scores(result.evaluations))
    return result._replace(metrics=metrics, steps=steps), logbook.warnings


def _resume(plan: Plan, directory: Path, checkpoints: "Checkpoints", params: PyTree) -> tuple[Progress | None, Chunk]:
    """The checkpoint to go on from, None for the beginning, and the recorded iterations before it."""
    recorded = from_process_zero(lambda: read_metrics(directory).get(plan.name, NO_ITERATIONS))
    initial = functools.partial(initial_states, plan.config)
    like = jax.eval_shape(initial, plan.hyperparams, plan.keys, plan.env_params, params)
    start = checkpoints.restore(like, at_most=len(recorded.steps))
    iteration, seconds = (0, 0.0) if start is None else (start.iteration, start.seconds)
    metrics = {name: values[:iteration] for name, values in recorded.metrics.items()}
    return start, Chunk(metrics, recorded.steps[:iteration], iteration=0, seconds=seconds)


def _logbook(
    plan: Plan,
    directory: Path,
    recording: Recording,
    console: bool | Console,
    past: Chunk | None,
    start: Progress | None,
) -> Logbook:
    """Process 0 alone writes, prints and has trackers."""
    trackers: list[Tracker] = []
    if recording.tensorboard and is_process_zero():
        folder = remove_if_unused(directory / "tensorboard") / plan.folder
        trackers.append(TensorBoard(folder, plan.settings, None if start is None else start.steps))
    if recording.wandb is not None and is_process_zero():
        remove_if_unused(directory / "wandb")
        about = {"run": plan.name, "config": plan.describe(), "settings": plan.settings}
        trackers.append(WeightsAndBiases(directory, mode=recording.wandb, **about))
    return Logbook(
        directory if is_process_zero() else None,
        run=plan.name,
        total_steps=most_steps(plan.config, plan.hyperparams),
        num_seeds=len(plan.keys),
        console=console if is_process_zero() else False,
        past=past,
        alarms=Alarms(plan.config.env.action_space, rows=plan.settings.word),
        trackers=trackers,
        settings=plan.settings,
    )

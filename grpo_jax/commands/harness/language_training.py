"""The runs of `grpo-jax lm`: trained, measured on held-out prompts, and saved as folders."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_jax import TrainState
from grpo_jax.commands.harness.language_folders import load_actors, save_models
from grpo_jax.commands.harness.language_runs import HeldOutCurves, held_out_reward
from grpo_jax.commands.harness.study import Study
from grpo_jax.commands.harness.token_runs import params_from_warm_start
from grpo_jax.language import LanguageTask, RewardError
from grpo_jax.recording import RunSpec
from grpo_jax.recording.files import folder_name
from grpo_jax.recording.folder_lock import StopSignal, deferred_signals


def train(arguments: Any, task: LanguageTask, starts: Sequence[Path], plans: Sequence[RunSpec]) -> None:
    """Trains models on a task, and writes the results, and the folder of the trained model of each seed.

    Args:
      arguments: the flags of `grpo-jax lm`.
      task: prompts and rewards.
      starts: the folder of each seed's model before training.
      plans: the runs, one after another, of one config; of several each has a folder of its own.
    """
    with deferred_signals() as received:
        study = Study("language_model", plans, arguments, score=held_out_reward(arguments.num_final))
        for plan in plans:
            out = study.out if len(plans) == 1 else study.out / folder_name(plan.label)
            out.mkdir(exist_ok=True)
            curves = HeldOutCurves(task, plan, out, study.console, arguments, received)
            states = _train(arguments, study, plan, starts, curves)
            curves.finish()
            params, curves.states = states.params, None
            del states  # the moments are no longer needed
            save_models(arguments, task, plan.config, params, starts, out, study.console)
            del params
        study.finish()


def _train(arguments: Any, study: Study, plan: RunSpec, starts: Sequence[Path], curves: HeldOutCurves) -> TrainState:
    """The trained states of a run, which is added to the study."""
    try:
        run = study.train(
            plan,
            arguments.evaluation_keys,
            params=lambda: params_from_warm_start(plan.config, load_actors(starts), plan.keys),
            callback=curves,
        )
    except StopSignal:
        save_models(arguments, curves.task, plan.config, curves.states.params, starts, curves.folder, study.console)
        raise
    except RewardError as error:
        if not (study.out / "checkpoints").is_dir():
            raise
        advice = f"to go on from the last checkpoint, repeat the command with --resume --out {study.out}"
        raise RewardError(f"{error}. Nothing before is lost: {advice}") from error
    study.add(run._replace(result=run.result._replace(states=None)))
    return run.result.states

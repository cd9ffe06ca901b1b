"""The runs of `grpo-jax lm`: trained, measured on held-out prompts, and saved as folders."""

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax import Config, TrainState
from grpo_jax.commands.harness.language_runs import HeldOutCurves, measured_on
from grpo_jax.commands.harness.study import CommandStudy
from grpo_jax.language import LanguageTask, RewardError, load_params, save_adapter, save_trained
from grpo_jax.language.folder import read_fields
from grpo_jax.policies import add_lora
from grpo_jax.recording.files import write_json
from grpo_jax.recording.run_folder import CHECKPOINTS, StopSignal, deferred_signals
from grpo_jax.runs.result import NUM_EPISODES
from grpo_jax.runs.run_spec import RunSpec
from grpo_jax.sweeps.runs import Score
from grpo_jax.types import PyTree

TEMPLATE = "template.json"


def train(arguments: Any, task: LanguageTask, plan: RunSpec) -> None:
    """Trains models on a task, and writes the results, and the folder of the trained model of each seed.

    Args:
      arguments: the flags of `grpo-jax lm`.
      task: prompts and rewards.
      plan: the run.
    """
    with deferred_signals() as received:
        last = f"last measurement: {measured_on(task, arguments)}"
        if arguments.sample_every == 0:
            last = f"last {NUM_EPISODES} or more completions of training"
        score = Score(None, f"mean reward of the {last}")
        study = CommandStudy("language_model", [plan], arguments, score=score)
        record_template(study.out, task)
        curves = HeldOutCurves(task, plan, study.out, study.console, arguments, received)
        params = _train(study, curves).params
        curves.finish()
        curves.states = None  # the moments are no longer needed
        save_models(curves, params)
        study.finish()
        if arguments.lora_rank is None and arguments.recording.checkpoint_every is None:
            shutil.rmtree(study.out / CHECKPOINTS, ignore_errors=True)  # large, and the models are written


def _train(study: CommandStudy, curves: HeldOutCurves) -> TrainState:
    """The trained states of a run, which is added to the study."""
    plan, keys = curves.plan, curves.arguments.evaluation_keys

    def params():
        actor = load_params(curves.arguments.model)["actor"]
        actors = jax.tree.map(lambda leaf: jnp.stack([leaf] * len(plan.keys)), actor)
        return params_from_warm_start(plan.config, actors, plan.keys)

    try:
        run = study.train(plan, keys, params=params, callback=curves)
    except StopSignal:
        save_models(curves, curves.states.params)
        raise
    except RewardError as error:
        if not (study.out / "checkpoints").is_dir():
            raise
        advice = f"to go on from the last checkpoint, repeat the command with --resume --out {study.out}"
        raise RewardError(f"{error}. Nothing before is lost: {advice}") from error
    rewards = run.result.final_return if curves.arguments.sample_every == 0 else curves.last_rewards
    study.add(run._replace(result=run.result._replace(states=None), final_returns=rewards))
    return run.result.states


def params_from_warm_start(config: Config, actor: PyTree, keys: jax.Array) -> PyTree:
    """Parameters of a policy whose networks, also the critic, are copies of an actor, with new heads.

    With LoRA the actor gets fresh adapters. Each leaf of the actor is `[R, ...]`.
    """

    def init(key, actor):
        if config.network.adapter is not None:
            actor = add_lora(config.network, {"actor": actor}, key)["actor"]
        if not config.policy.has_critic:
            return {"actor": actor}
        return {
            name: {part: actor.get(part, value) for part, value in network.items()}
            for name, network in config.policy.init(key).items()
        }

    return jax.jit(jax.vmap(init))(keys, actor)


def record_template(out: Path, task: LanguageTask) -> None:
    """Writes how prompts are read and completions end: to resume on another day, and to ask the model."""
    fields: dict[str, Any] = {"chats": task.prompts.are_chats, "stop_strings": list(task.stop_strings)}
    if (template := task.model.tokenizer.template) is not None:
        fields |= {"date": template.date, "variables": template.variables}
    write_json(out / TEMPLATE, fields)


def recorded_template(run: Path) -> dict[str, Any]:
    """What the run in a folder has recorded of its prompts and completions; {} without such a run."""
    kinds = {"date": str, "variables": dict[str, Any], "chats": bool, "stop_strings": list[str]}
    return read_fields(run, TEMPLATE, kinds)


def model_folders(out: Path, name: str, num_seeds: int) -> list[Path]:
    """The folder of the model of each seed: NAME for a single one, or else NAME_0, NAME_1, ..."""
    return [out / name] if num_seeds == 1 else [out / f"{name}_{seed}" for seed in range(num_seeds)]


def save_models(curves: HeldOutCurves, params: PyTree) -> None:
    """Writes the folder of the model of each seed, or that of its adapter, beside the measurements of a run.

    Args:
      curves: of the run.
      params: trained, each leaf `[num_seeds, ...]`.
    """
    arguments, config = curves.arguments, curves.plan.config
    # What an adapter on an adapter changes is not the base model's.
    saves_adapter = arguments.lora_rank is not None and not arguments.merge_lora and curves.task.model.adapter is None
    save, name = (save_adapter, "adapter") if saves_adapter else (save_trained, "model")
    for seed, folder in enumerate(model_folders(curves.folder, name, arguments.num_seeds)):
        trained = curves.task.model._replace(architecture=config.network)
        save(folder, trained, jax.tree.map(lambda leaf, seed=seed: leaf[seed], params), dtype=arguments.save_dtype)
        curves.console.print(f"The trained {name}: {folder}", soft_wrap=True)

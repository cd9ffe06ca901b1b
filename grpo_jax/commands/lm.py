"""GRPO on a language model: prompts from a file, rewards in Python.

`grpo-jax lm --model FOLDER --prompts FILE.jsonl --reward package.module:function`
"""

import dataclasses
from pathlib import Path

from grpo_jax import Config, objectives, with_reference
from grpo_jax.algorithms import Algorithm, by_name
from grpo_jax.commands.harness.command import command, make_console
from grpo_jax.commands.harness.language_flags import DEFAULTS, Arguments, parse
from grpo_jax.commands.harness.language_training import recorded_template, train
from grpo_jax.errors import ConfigError
from grpo_jax.groups import FRESH
from grpo_jax.importing import import_object
from grpo_jax.language import LanguageTask, language_environment, load_model, load_reward, read_prompts, split_held_out
from grpo_jax.language.folder import as_config_error
from grpo_jax.language.models import stopping_plan
from grpo_jax.runs.run_spec import RunSpec
from grpo_jax.runs.tuned import without_unread
from grpo_jax.training.checks import changed

SMALL_VOCABULARY = 4096
"""The most tokens for which all logits of an iteration are computed at once, and divergences exactly."""
MAX_LOGITS = 2**25
"""The most logits that an update computes at once for larger vocabularies: 128 MiB, thrice that with their gradient."""


def make_task(arguments: Arguments) -> LanguageTask:
    prompts, path = read_prompts(arguments.prompts), Path(arguments.held_out)
    if path.is_file():
        held_out = read_prompts(path)
    else:
        with as_config_error(f"--held-out {path} is neither a file nor a share of the prompts, such as 0.1: %s"):
            prompts, held_out = split_held_out(prompts, float(arguments.held_out))
    date = recorded_template(arguments.out).get("date") if arguments.recording.resume and arguments.out else None
    return LanguageTask(
        model=load_model(arguments.model, date=date, **arguments.model_options),
        prompts=prompts,
        rewards=tuple(map(load_reward, arguments.reward)),
        held_out=held_out,
        max_completion=arguments.max_completion,
        process_rewards=arguments.process_rewards,
        stop_strings=arguments.stop_strings,
        respond=arguments.respond and import_object(arguments.respond, "respond"),
        max_turns=arguments.max_turns,
    )


def make_algorithm(arguments: Arguments) -> Algorithm:
    """The algorithm with rollouts that begin with a prompt, and KL to the model before training, if it has a weight.

    DAPO and others without a KL penalty by design get one only with --kl, unless they have values of states, like PPO.
    """
    found = by_name(arguments.algorithm)._replace(start=FRESH)
    if not arguments.hyperparams.kl_coef:
        others = tuple(each for each in found.penalties if each is not objectives.kl_to_behaviour)
        return found._replace(penalties=others)
    if arguments.kl is not None:
        return with_reference(found, kl=getattr(objectives, arguments.kl))
    has_values = found.critic is not None or found.baseline is not None
    return with_reference(found) if objectives.kl_to_behaviour in found.penalties or has_values else found


def check_used(arguments: Arguments) -> None:
    """Raises ConfigError for a flag that would do nothing beside others."""
    unused = {}
    if arguments.sample_every == 0:
        of_measurements = "stop_at_reward", "num_held_out", "num_samples", "correct_at"
        unused |= dict.fromkeys(of_measurements, "is for measurements, of which --sample-every 0 makes none")
    if arguments.lora_rank is None:
        unused["merge_lora"] = "is for adapters, of which there are none without --lora-rank"
    if not arguments.hyperparams.kl_coef:
        unused["kl"] = "estimates a penalty, which --kl-coef 0 removes"
    for name, why in unused.items():
        if getattr(arguments, name) != getattr(Arguments, name):
            raise ConfigError(f"--{name.replace('_', '-')} {why}; leave it out")


def make_plan(arguments: Arguments, task: LanguageTask) -> RunSpec:
    def given(*names):
        return {name: getattr(arguments, name) for name in names}

    if arguments.lora_rank is not None and arguments.lora_rank > task.model.architecture.width:
        raise ConfigError(
            f"--lora-rank {arguments.lora_rank} is more than the model's width of {task.model.architecture.width}, so "
            "that adapters would be larger than what they adapt; use 8 to 64, or leave it out to train all weights"
        )
    check_used(arguments)
    lora = given("lora_rank", "lora_alpha", "frozen_dtype", "checkpoint_layers")
    algorithm = make_algorithm(arguments)
    architecture = dataclasses.replace(task.model.architecture, **lora, shared_critic=algorithm.critic is not None)
    config = Config(
        environment=language_environment(task),
        algorithm=algorithm,
        num_envs=arguments.num_prompts * arguments.group_size,
        **given("group_size", "num_epochs", "num_minibatches", "num_microbatches"),
        **given("optimizer", "schedule"),
        truncate_sampling=arguments.hyperparams.truncates,
        network=architecture,
        logits_chunk=MAX_LOGITS // size if (size := architecture.vocab_size) > SMALL_VOCABULARY else None,
        execution_plan=stopping_plan(),
    )
    hyperparams = arguments.hyperparams
    presets = [name for name, value in changed(DEFAULTS).items() if value == getattr(hyperparams, name)]
    presets += () if hyperparams.kl_coef else ("kl_coef",)  # 0 leaves the penalty out
    hyperparams = without_unread(config, hyperparams, presets)
    return RunSpec(arguments.algorithm, config, hyperparams, arguments.training_keys)


def main(arguments: Arguments) -> None:
    console = make_console(width=80, stderr=arguments.format != "table")
    console.print(f"Reading prompts from {arguments.prompts}", soft_wrap=True)
    task = make_task(arguments)
    console.print(f"Loading the weights of {arguments.model}", soft_wrap=True)
    if (adapter := task.model.adapter) is not None:
        saved = "" if arguments.lora_rank is None else ", and a whole model is saved"
        console.print(f"Training begins with {adapter}, added to {task.model.folder}{saved}", soft_wrap=True)
    train(arguments, task, make_plan(arguments, task))


if __name__ == "__main__":
    command(lambda: main(parse()))

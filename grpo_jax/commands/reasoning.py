"""The recipe of reasoning models on arithmetic, from nothing to a saved model: `grpo-jax reasoning`."""

import dataclasses
import shutil
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from grpo_jax import Hyperparams
from grpo_jax.commands import lm, tiny_language_model
from grpo_jax.commands.harness.arithmetic import (
    accuracy,
    demonstrate,
    make_problems,
    right_steps,
    well_formed,
    write_lines,
)
from grpo_jax.commands.harness.command import command, make_console, need_one_process, new_folder
from grpo_jax.commands.harness.language_flags import TrainingArguments, parse
from grpo_jax.commands.harness.language_folders import model_folders
from grpo_jax.commands.harness.limits import Count, Finite, Positive, Share
from grpo_jax.commands.harness.study import RecordingArguments, check_plans
from grpo_jax.commands.harness.token_runs import format_shares
from grpo_jax.language import (
    LanguageTask,
    Prompts,
    Reward,
    learn_demonstrations,
    load_model,
    read_prompts,
    save_trained,
)
from grpo_jax.types import PyTree

BATCH_SIZE = 64  # demonstrations of a gradient step
PROMPTS, HELD_OUT, DEMONSTRATIONS = "prompts.jsonl", "held_out.jsonl", "demonstrations.jsonl"


@dataclasses.dataclass(kw_only=True)
class Arguments(TrainingArguments):
    """Prompts, a tokenizer, a tiny model that learns from demonstrations, then GRPO with two rewards and a reference.

    Everything is made here and written to a folder: prompts.jsonl, held_out.jsonl, demonstrations.jsonl, the model
    after the demonstrations (start), the model after GRPO (model), and the results.
    """

    num_terms: Count = 3
    """Numbers in each problem, such as 8+9-5."""
    largest: Count = 12
    """The largest of these numbers."""
    num_training: Count = 4000
    """Problems to train on, which include the demonstrations'."""
    num_test: Count = 250
    """Held-out problems."""
    num_layers: Count = 2
    """Transformer blocks."""
    width: Count = 64
    """Width of the residual stream."""
    vocab_size: tiny_language_model.VocabularySize = 288
    """The most tokens of the byte-level BPE: 256 bytes, 2 special tokens, and merges."""
    target: Share = 0.3
    """Supervised learning from demonstrations ends at this accuracy of sampled completions."""
    demonstration_rate: Positive = 4e-3
    """Adam's step size for the demonstrations."""
    accuracy: Finite = 1.0
    """Weight of the reward for the right answer."""
    well_formed: Finite = 0.2
    """Weight of the reward for the format <think>...</think><answer>...</answer>."""
    right_steps: Finite = 0.0
    """Weight of the rewards for right lines within <think>, each paid where the line ends; 0: none. For process
    supervision also set the algorithm, grpo_process."""

    max_completion: Count = 36
    num_prompts: Count = 32
    group_size: Count = 8
    num_epochs: Count = 2
    num_minibatches: Count = 2
    sample_every: Count = 20
    num_held_out: Count = 128
    hyperparams: Hyperparams = dataclasses.field(
        default_factory=lambda: Hyperparams(
            learning_rate=3e-4, kl_coef=0.001, num_iterations=200, discount=1.0, gae_lambda=1.0
        )
    )
    recording: RecordingArguments = dataclasses.field(default_factory=lambda: RecordingArguments(policies=False))


def write_problems(out: Path, arguments: Arguments) -> None:
    sizes = {"num_terms": arguments.num_terms, "largest": arguments.largest}
    held_out = make_problems(arguments.num_test, seed=1, **sizes)
    excluded = [problem["prompt"] for problem in held_out]
    training = make_problems(arguments.num_training, seed=0, excluded=excluded, **sizes)
    write_lines(out / PROMPTS, training)
    write_lines(out / HELD_OUT, held_out)
    write_lines(out / DEMONSTRATIONS, map(demonstrate, training))


def make_task(out: Path, model: Path, arguments: Arguments) -> LanguageTask:
    """The prompts and rewards, with the tokenizer of the model in a folder."""
    weights = {accuracy: arguments.accuracy, well_formed: arguments.well_formed, right_steps: arguments.right_steps}
    return LanguageTask(
        model=load_model(model, compute_dtype=arguments.compute_dtype),
        prompts=read_prompts(out / PROMPTS),
        held_out=read_prompts(out / HELD_OUT),
        rewards=tuple(Reward(function.__name__, function, weight) for function, weight in weights.items()),
        max_completion=arguments.max_completion,
        process_rewards=arguments.right_steps > 0,
    )


def make_random_model(out: Path, random: Path, arguments: Arguments) -> None:
    """Writes the problems, and the folder of a model with random weights and their tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    write_problems(out, arguments)
    tiny_language_model.main(
        tiny_language_model.Arguments(
            out=random,
            prompts=out / DEMONSTRATIONS,
            num_layers=arguments.num_layers,
            width=arguments.width,
            vocab_size=arguments.vocab_size,
            context=arguments.max_completion + 64,
        )
    )


def make_start(out: Path, arguments: Arguments) -> tuple[LanguageTask, list[Path]]:
    """The task, and the folder of each seed's model after supervised learning; makes what is missing."""
    console = make_console()
    random, starts = out / "random", model_folders(out, "start", arguments.num_seeds)
    is_new = not out.exists()
    try:
        if not (random / "config.json").exists():
            make_random_model(out, random, arguments)
        task = make_task(out, random, arguments)
        check_plans(lm.make_plans(arguments, task), arguments)
        learnt = None
        if not all((folder / "config.json").exists() for folder in starts):
            learnt = imitate_demonstrations(task, read_prompts(out / DEMONSTRATIONS), arguments, console)
    except BaseException:
        if is_new:  # so that a corrected start may use the same folder
            shutil.rmtree(out, ignore_errors=True)
        raise
    if learnt is not None:
        for seed, folder in enumerate(starts):
            save_trained(folder, task.model, jax.tree.map(lambda leaf, seed=seed: leaf[seed], learnt))
            console.print(f"The model after the demonstrations: {folder}", soft_wrap=True)
    return task, starts


def imitate_demonstrations(
    task: LanguageTask, demonstrations: Prompts, arguments: Arguments, console: Console
) -> PyTree:
    """The weights of each seed after supervised learning from random ones; all of them learn, also with LoRA."""
    count = len(demonstrations.contents)
    console.print(f"Supervised learning from {count} demonstrations, after compilation. The first of them:")
    console.print(f"  {demonstrations.contents[0]!r} -> {demonstrations.fields['completion'][0]!r}", soft_wrap=True)

    def report(accuracies: np.ndarray, updates: np.ndarray) -> None:
        shares = format_shares(accuracies)
        console.print(f"  after {updates.max()} updates: sampled accuracy {shares}", soft_wrap=True)

    config = lm.make_plan(arguments, task).config
    start = learn_demonstrations(
        dataclasses.replace(config, network=config.network.without_lora),
        task,
        demonstrations,
        jax.random.split(jax.random.fold_in(jax.random.key(arguments.seed), 1), arguments.num_seeds),
        target=arguments.target,
        learning_rate=arguments.demonstration_rate,
        batch_size=BATCH_SIZE,
        report=report,
    )
    return start.params


def main(arguments: Arguments) -> None:
    need_one_process("language models")
    arguments.out = arguments.out or new_folder("reasoning")
    lm.train(arguments, *make_start(arguments.out, arguments))


if __name__ == "__main__":
    command(lambda: main(parse(Arguments)))

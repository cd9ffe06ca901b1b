"""Answers of a language model to prompts: `grpo-jax ask runs/mine "What is 2 + 3?"`."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro
from rich.console import Console

from grpo_jax.commands.harness.command import command, make_console
from grpo_jax.commands.harness.language_flags import CompletionArguments
from grpo_jax.commands.harness.language_training import recorded_template
from grpo_jax.commands.harness.limits import Count, NotNegative, Seed
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.errors import ConfigError
from grpo_jax.language import load_model
from grpo_jax.language.folder import as_config_error, find_model
from grpo_jax.language.prompts import as_prompts
from grpo_jax.language.rewards import text_of
from grpo_jax.language.tokenizer import Prompt


@dataclasses.dataclass
class Arguments(CompletionArguments):
    """Prints what the model in a folder answers to prompts, all of them at once."""

    folder: Annotated[Path, tyro.conf.Positional]
    """Folder of a model, of an adapter (LoRA), or of a run of grpo-jax lm."""
    prompts: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PROMPT ...")] = ()
    """Texts; - reads each line of standard input: a text, or an object as in a file of prompts."""
    prompt_kind: Literal["auto", "chat", "text"] = "auto"
    """chat: messages of a user, rendered by the model's template; text: texts to continue; auto: what the run had that
    trained the model, or else chat if the model has a template."""
    temperature: NotNegative | None = None
    """Sample at this temperature; None: the most probable tokens, or 1 with several samples."""
    num_samples: Count = 1
    """Answers to each prompt."""
    seed: Seed = 0
    """Seed of samples."""
    json: bool = False
    """Print a line of JSON for each prompt."""


def main(arguments: Arguments) -> None:
    prompts = read_prompts(arguments.prompts)
    found, adapter = find_model(arguments.folder)
    recorded = recorded_template((adapter or found).resolve().parent)
    options = arguments.model_options
    options["template_variables"] = (recorded.get("variables") or {}) | options["template_variables"]
    model = load_model(arguments.folder, date=recorded.get("date"), **options)
    is_chat = {"chat": True, "text": False, "auto": recorded.get("chats", model.tokenizer.template is not None)}
    chats = [[{"role": "user", "content": each}] if isinstance(each, str) else each for each in prompts]
    sampling = {} if arguments.temperature is None else {"temperature": arguments.temperature}
    if arguments.seed and not sampling and arguments.num_samples == 1:
        raise ConfigError(f"--seed {arguments.seed} is of samples, and there are none; add --temperature 1")
    with Console(stderr=True).status(f"{adapter or found}: reading the weights, compiling, answering"):
        answers = model.complete(
            chats if is_chat[arguments.prompt_kind] else prompts,
            jax.random.key(arguments.seed) if sampling or arguments.num_samples > 1 else None,
            num_samples=arguments.num_samples,
            max_completion=arguments.max_completion,
            stop_strings=arguments.stop_strings or recorded.get("stop_strings") or (),
            **sampling,
        )
    console = make_console()
    for prompt, texts in zip(prompts, answers, strict=True):
        if arguments.json:
            print(json.dumps({"prompt": prompt, "answers": texts}, ensure_ascii=False))
            continue
        if len(prompts) > 1:
            console.print(text_of(prompt), style="bold", soft_wrap=True)
        for number, text in enumerate(texts, start=1):
            console.print(f"{number}. {text}" if len(texts) > 1 else text, soft_wrap=True)


def read_prompts(words: tuple[str, ...]) -> list[Prompt]:
    """The prompts of the command line; ConfigError without any, or for one that is empty or no object with a prompt."""
    prompts = []
    for word in words:
        lines = filter(str.strip, sys.stdin.read().splitlines()) if word == "-" else [word]
        for line in lines:  # one of JSON is that of a file of prompts, whose texts may have several lines
            with as_config_error(f"{line:.200} is no prompt: %s"):
                is_object = word == "-" and line.lstrip().startswith("{")
                prompts.append(as_prompts([json.loads(line)]).contents[0] if is_object else line)
    if not prompts or not all(text_of(prompt).strip() for prompt in prompts):
        raise ConfigError('there is no prompt, or an empty one; write it after the folder, such as "What is 2 + 3?"')
    return prompts


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

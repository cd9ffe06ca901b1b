"""The recipe of reasoning models on arithmetic, from nothing to a saved model: `python -m experiments.reasoning`.

Prompts, a tokenizer, a tiny model for each seed that learns from demonstrations, then `grpo-jax lm` with rewards for
the answer and the format, and the model after the demonstrations as the reference.
"""

import dataclasses
import json
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from grpo_jax.commands import lm
from grpo_jax.commands.harness.command import command, make_console
from grpo_jax.commands.harness.language_training import model_folders
from grpo_jax.commands.harness.limits import Count, Seeds, Share
from grpo_jax.commands.harness.parsing import parse_known_flags
from grpo_jax.language import make_tiny_model, read_prompts, save_trained

from .harness.demonstrations import learn_demonstrations

FORMAT = re.compile(r"<think>\n?(.*?)\n?</think>\n?<answer>(.*?)</answer>", re.DOTALL)
"""The thoughts and the answer of a completion."""
FLAGS = (
    "--max-completion 36 --num-prompts 32 --num-epochs 2 --num-minibatches 2 --sample-every 20 --num-held-out 128 "
    "--learning-rate 3e-4 --kl-coef 0.001 --num-iterations 200 --reward experiments.reasoning:accuracy "
    "--reward experiments.reasoning:well_formed=0.2"
).split()
"""Of `grpo-jax lm`; those on the command line come after them."""


@dataclasses.dataclass(kw_only=True)
class Arguments:
    """Everything is made here and written to a folder; further flags are those of `grpo-jax lm`."""

    out: Path = Path("runs/reasoning")
    """Folder for prompts.jsonl, held_out.jsonl, demonstrations.jsonl, start (the model after these) and run."""
    num_seeds: Seeds = 1
    """Independent runs, each with its own start."""
    num_terms: Count = 3
    """Numbers in each problem, such as 8+9-5."""
    largest: Count = 12
    """The largest of these numbers."""
    num_training: Count = 4000
    """Problems to train on, which include the demonstrations'."""
    num_test: Count = 250
    """Held-out problems."""
    width: Count = 64
    """Width of the residual stream of two blocks."""
    target: Share = 0.3
    """Supervised learning from demonstrations ends at this accuracy of sampled completions."""


def make_problems(
    count: int, *, num_terms: int, largest: int, seed: int, excluded: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """Distinct problems such as {"prompt": "What is 12+34-5?", "answer": "41", "steps": ["12+34=46", "46-5=41"]}.

    No partial sum is negative; `excluded` are prompts that are not drawn.
    """
    draw, problems, taken = random.Random(seed), [], set(excluded)
    while len(problems) < count:
        terms, steps = [draw.randint(1, largest)], []
        text, total = str(terms[0]), terms[0]
        for _ in range(num_terms - 1):
            sign, term = draw.choice("+-"), draw.randint(1, largest)
            result = total + term if sign == "+" else total - term
            steps.append(f"{total}{sign}{term}={result}")
            text, total = f"{text}{sign}{term}", result
            if total < 0:
                break
        prompt = f"What is {text}?"
        if total >= 0 and prompt not in taken:
            taken.add(prompt)
            problems.append({"prompt": prompt, "answer": str(total), "steps": steps})
    return problems


def demonstrate(problem: dict[str, Any]) -> dict[str, str]:
    """The prompt and its right completion, such as "<think>1+2=3</think><answer>3</answer>"."""
    thoughts = "\n".join(problem["steps"])
    completion = f"<think>{thoughts}</think><answer>{problem['answer']}</answer>"
    return {"prompt": problem["prompt"], "completion": completion}


def accuracy(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """1 if the text within <answer> is the answer, with any text before it."""
    found = [re.search(r"<answer>\s*(.*?)\s*</answer>", completion, re.DOTALL) for completion in completions]
    return [float(bool(match) and match[1] == right) for match, right in zip(found, answer, strict=True)]


def well_formed(completions: Sequence[str]) -> list[float]:
    """1 if the whole completion is <think>...</think><answer>...</answer>."""
    return [float(bool(FORMAT.fullmatch(completion))) for completion in completions]


def write_problems(arguments: Arguments) -> None:
    sizes = {"num_terms": arguments.num_terms, "largest": arguments.largest}
    held_out = make_problems(arguments.num_test, seed=1, **sizes)
    excluded = [problem["prompt"] for problem in held_out]
    training = make_problems(arguments.num_training, seed=0, excluded=excluded, **sizes)
    files = {"prompts": training, "held_out": held_out, "demonstrations": map(demonstrate, training)}
    for name, rows in files.items():
        (arguments.out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(arguments: Arguments, flags: Sequence[str]) -> None:
    out, random_weights = arguments.out, arguments.out / "random"
    starts, console = model_folders(out, "start", arguments.num_seeds), make_console()
    out.mkdir(parents=True, exist_ok=True)
    if not (random_weights / "config.json").exists():
        write_problems(arguments)
        texts = (out / "demonstrations.jsonl").read_text().splitlines()
        make_tiny_model(random_weights, texts, width=arguments.width, vocab_size=288, context=100)
    given = [f"--model={random_weights}", f"--prompts={out}/prompts.jsonl", f"--held-out={out}/held_out.jsonl"]
    given += [f"--out={out}/run", f"--num-seeds={arguments.num_seeds}"]
    training = lm.parse([*given, *FLAGS, *flags])
    task = lm.make_task(training)
    if not all((folder / "config.json").exists() for folder in starts):
        config = lm.make_plan(training, task).config
        learnt = learn_demonstrations(
            dataclasses.replace(config, network=config.network.without_lora),
            task,
            read_prompts(out / "demonstrations.jsonl"),
            jax.random.split(jax.random.fold_in(jax.random.key(training.seed), 1), arguments.num_seeds),
            target=arguments.target,
            learning_rate=4e-3,
            batch_size=64,
        )
        console.print(f"{learnt.updates.max()} updates on demonstrations: {learnt.accuracy}")
        for seed, folder in enumerate(starts):
            save_trained(folder, task.model, jax.tree.map(lambda leaf, seed=seed: leaf[seed], learnt.params))
    lm.train(training, task, starts, lm.make_plan(training, task))


if __name__ == "__main__":
    command(lambda: main(*parse_known_flags(Arguments)))

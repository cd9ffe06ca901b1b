"""Arithmetic with the steps written out: problems, demonstrations, and rewards of the answer, the format, the steps."""

import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_jax.errors import ConfigError

FORMAT = re.compile(r"<think>\n?(.*?)\n?</think>\n?<answer>(.*?)</answer>", re.DOTALL)
"""The thoughts and the answer of a completion."""


def make_problems(
    count: int, *, num_terms: int, largest: int, seed: int, excluded: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """Distinct problems such as {"prompt": "What is 12+34-5?", "answer": "41", "steps": ["12+34=46", "46-5=41"]}.

    Args:
      count: number of problems.
      num_terms: numbers in each.
      largest: the largest of these numbers; the smallest is 1, and no partial sum is negative.
      seed: of the problems.
      excluded: prompts that are not drawn.

    Raises:
      ConfigError: there are not so many.
    """
    draw, problems, taken, num_drawn = random.Random(seed), [], set(excluded), 0
    while len(problems) < count:
        num_drawn += 1
        if num_drawn > 100 * (count + len(taken)):
            raise ConfigError(
                f"{count} problems with num_terms={num_terms} and largest={largest} cannot be found beside "
                f"{len(taken) - len(problems)} others, as all differ; raise num_terms or largest, or make fewer"
            )
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


def demonstrate(problem: Mapping[str, Any]) -> dict[str, str]:
    """A demonstration: the prompt and its right completion, such as "<think>1+2=3</think><answer>3</answer>"."""
    thoughts = "\n".join(problem["steps"])
    completion = f"<think>{thoughts}</think><answer>{problem['answer']}</answer>"
    return {"prompt": problem["prompt"], "completion": completion}


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def accuracy(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """1 if the text within <answer> is the answer, with any text before it."""
    found = [re.search(r"<answer>\s*(.*?)\s*</answer>", completion, re.DOTALL) for completion in completions]
    return [float(bool(match) and match[1] == right) for match, right in zip(found, answer, strict=True)]


def well_formed(completions: Sequence[str]) -> list[float]:
    """1 if the whole completion is <think>...</think><answer>...</answer>."""
    return [float(bool(FORMAT.fullmatch(completion))) for completion in completions]


def right_steps(completions: Sequence[str], steps: Sequence[Sequence[str]]) -> list[list[tuple[int, float]]]:
    """For each line within <think>, in which character it ends and its reward, as a list of (position, number).

    Of n lines and m right steps, a line that is the right step in its place gets 1 / max(n, m), and any other line 0.
    """
    payments = []
    for completion, right in zip(completions, steps, strict=True):
        match, paid = FORMAT.match(completion), []
        lines, end = (match[1].split("\n"), match.start(1)) if match else ([], 0)
        for number, line in enumerate(lines):
            end += len(line)
            is_right = right[number : number + 1] == [line]
            paid.append((end, is_right / max(len(lines), len(right))))
            end += 1  # the line break
        payments.append(paid)
    return payments

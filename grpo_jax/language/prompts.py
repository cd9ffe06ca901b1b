"""Prompts from a file: texts or chats, with fields for the rewards."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.environments.tokens import PAD
from grpo_jax.errors import ConfigError
from grpo_jax.language.chat import as_messages
from grpo_jax.language.tokenizer import Prompt, Tokenizer
from grpo_jax.recording.files import as_path

RESERVED = ("prompts", "completions", "completion_ids", "max_completion", "iteration")
"""Arguments of every reward, whose names the field of a prompt may not have."""

EXAMPLE = '{"prompt": "2 + 3 =", "answer": "5"}'


class Prompts(NamedTuple):
    """`N` prompts, all texts or all chats."""

    contents: Sequence[Prompt]  # [N]
    fields: dict[str, list]  # the other fields of the lines, [N] each
    sources: Sequence[str]  # [N] where each comes from, for errors

    @property
    def are_chats(self) -> bool:
        """Whether they are lists of messages."""
        return not isinstance(self.contents[0], str)

    def select(self, rows: Sequence[int]) -> "Prompts":
        """Some of the prompts."""
        fields = {name: [values[row] for row in rows] for name, values in self.fields.items()}
        return Prompts([self.contents[row] for row in rows], fields, [self.sources[row] for row in rows])


def read_prompts(path: str | Path) -> Prompts:
    """The prompts in a file of JSON lines, see `as_prompts`; ConfigErrors name the line. Empty lines are skipped."""
    path = source = as_path(path)
    rows = {}
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # texts may contain other separators
        for number, line in enumerate(lines, start=1):
            source = f"{path}, line {number}"
            if line.strip():
                rows[source] = json.loads(line)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source} cannot be read: {error}; write objects of JSON such as {EXAMPLE}") from error
    if not rows:
        raise ConfigError(f"{path} is empty; write a line such as {EXAMPLE} for each prompt")
    return as_prompts(list(rows.values()), list(rows))


def as_prompts(rows: Sequence[dict[str, Any]], sources: Sequence[str] | None = None) -> Prompts:
    """The prompts of objects such as `{"prompt": "2 + 3 =", "answer": "5"}`.

    Args:
      rows: one or more, with `prompt`, a text or a list of messages, or with `messages`. Rewards get all further
        fields, by their names.
      sources: where each row comes from, for errors.

    Raises:
      ConfigError: there are no rows, a row has no prompt, or they differ in their fields.
    """
    if isinstance(rows, str | bytes | Mapping | Prompts) or not rows:
        raise ConfigError(f"there are no prompts in {rows!r:.200}; give a list of one or more, such as {EXAMPLE}")
    sources = [f"prompt {number}" for number in range(len(rows))] if sources is None else sources
    contents = [_content(row, source) for row, source in zip(rows, sources, strict=True)]
    names = [name for name in rows[0] if name not in ("prompt", "messages")]
    if reserved := [name for name in names if name in RESERVED]:
        raise ConfigError(f"{sources[0]}: the field {reserved[0]!r} has the name of an argument of rewards; rename it")
    for row, content, source in zip(rows, contents, sources, strict=True):
        if differing := sorted({*names} ^ (row.keys() - {"prompt", "messages"})):
            has = f"{source} {'lacks' if differing[0] in names else 'has'} the field {differing[0]!r}"
            raise ConfigError(f"{has}, unlike {sources[0]}; give every line the same fields, null without a value")
        if isinstance(content, str) != isinstance(contents[0], str):
            raise ConfigError(f"{source}: some prompts are texts and others messages; write all of them in one way")
    return Prompts(contents, {name: [row[name] for row in rows] for name in names}, sources)


def split_held_out(prompts: Prompts, share: float) -> tuple[Prompts, Prompts]:
    """The prompts to train on and the held-out ones: a share of the distinct prompts, those with the lowest hashes.

    Each side gets at least one. ConfigError if the share is not between 0 and 1, or there are not two distinct prompts.
    """
    if not 0 < share < 1:
        raise ConfigError(f"held_out={share} is not a share of the prompts between 0 and 1; use 0.1, or name a file")
    hashes = [hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest() for content in prompts.contents]
    distinct = sorted(set(hashes))
    if len(distinct) < 2:
        raise ConfigError(f"{prompts.sources[0]}: one prompt cannot be split; add prompts, or name a held-out file")
    held_out = set(distinct[: min(max(1, round(share * len(distinct))), len(distinct) - 1)])
    sides = ([row for row, each in enumerate(hashes) if (each in held_out) == side] for side in (False, True))
    return tuple(map(prompts.select, sides))


def prompts_of(prompts: Prompts | Sequence[Prompt]) -> Prompts:
    """Texts or chats as prompts without fields; ConfigError for anything else, such as a single text."""
    if isinstance(prompts, Prompts):
        return prompts
    if not isinstance(prompts, list | tuple):
        raise ConfigError(f"prompts are a list of texts or chats, or what read_prompts gives, but not {prompts!r:.200}")
    return as_prompts([{"prompt": prompt} for prompt in prompts])


def encode_prompts(tokenizer: Tokenizer, prompts: Prompts | Sequence[Prompt]) -> np.ndarray:
    """The tokens of prompts, as for `generate`: int32 `[N, P]`, shorter ones padded with -1 on the left."""
    prompts, rows = prompts_of(prompts), []
    for content, source in zip(prompts.contents, prompts.sources, strict=True):
        try:
            rows.append(tokenizer.encode(content))
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error
        if not rows[-1]:
            raise ConfigError(f"{source}: the prompt has no tokens; write at least one character")
    longest = max(map(len, rows))
    return np.array([[PAD] * (longest - len(row)) + row for row in rows], np.int32)


def rounds(seed: Sequence[int], num_prompts: int, num_groups: int, iteration: int) -> np.ndarray:
    """Which of `N` prompts the groups of an iteration get, int32 `[G]`: all prompts before any comes again.

    Each pass through the prompts has an order of its own, drawn from the seed.
    """
    first, before = divmod(iteration * num_groups, num_prompts)
    passes = range(first, first + (before + num_groups - 1) // num_prompts + 1)
    orders = [np.random.default_rng([*seed, number]).permutation(num_prompts) for number in passes]
    return np.concatenate(orders)[before : before + num_groups].astype(np.int32)


def _content(row: dict[str, Any], source: str) -> Prompt:
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise ConfigError(f"{source} is no object with either prompt or messages: {row!r:.200}; write {EXAMPLE}")
    prompt = row.get("prompt", row.get("messages"))
    try:
        return prompt if isinstance(prompt, str) and "prompt" in row else as_messages(prompt)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error

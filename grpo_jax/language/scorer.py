"""Rewards by a model: a scorer from a folder in the layout of transformers' AutoModelForSequenceClassification."""

import dataclasses
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.environments.tokens import PAD
from grpo_jax.errors import ConfigError, as_count
from grpo_jax.language.chat import Messages, joined
from grpo_jax.language.models import LanguageModel, load_model, read_config
from grpo_jax.language.prompts import prompts_of
from grpo_jax.language.rewards import Reward, read_weight
from grpo_jax.language.tokenizer import Prompt
from grpo_jax.language.weights import load_scorer_params
from grpo_jax.policies import Transformer
from grpo_jax.policies.token_policy import text_features
from grpo_jax.recording.files import as_path
from grpo_jax.types import PyTree

SHORTEST = 16
"""Texts are padded to this many tokens, or twice as many, and so on: a program is compiled for each length."""

Scored = tuple[list[int], list[tuple[int, int]]]
"""The tokens of a text, and where its steps end: after which character of the completion, and at which token."""


@dataclasses.dataclass(frozen=True, eq=False)
class Scorer:
    """A transformer with a linear head, as a reward function: `Reward("helpful", load_scorer("scorer"))`.

    It reads the text of a prompt and its completion with its own tokenizer and chat template. It is computed on the
    CPU, as an accelerator waits for rewards.
    """

    model: LanguageModel
    params: PyTree
    """Of the transformer."""
    head: jax.Array
    """`[width]`: the weights of the chosen label."""
    pad_token: int | None = None
    """The score is read before such tokens at the end of a text, as in transformers; None: at its last token."""
    step_separator: str | None = None
    """The text that ends a step: each step gets a score; None: the whole completion gets one."""
    batch_size: int = 16
    """Texts that are computed at once."""

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[str | Messages]) -> list[Any]:
        """The score of each completion, or with a separator a list of (position, score), one for each step.

        Raises:
          ConfigError: a text is longer than the scorer's context, or has no token at all.
        """
        pairs = zip(prompts_of(prompts).contents, completions, strict=True)
        scored = [self._tokens(prompt, completion) for prompt, completion in pairs]
        values = self._values([tokens for tokens, _ in scored])
        if self.step_separator is None:
            return [float(row[-1]) for row in values]
        rows = zip(values, scored, strict=True)
        return [[(end, float(row[index])) for end, index in ends] for row, (_, ends) in rows]

    def check(self, prompt: Prompt, source: str) -> None:
        """Raises ConfigError for a prompt that the scorer cannot read, such as a chat without a chat template.

        Args:
          prompt: completed by a single character.
          source: where it comes from, for the error.
        """
        completion = "a" if isinstance(prompt, str) else [{"role": "assistant", "content": "a"}]
        try:
            self._tokens(prompt, completion)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error

    @property
    def identity(self) -> tuple:
        """What a resumed run compares."""
        return self.params, self.head, self.step_separator, getattr(self.model.tokenizer.template, "dates", None)

    def _tokens(self, prompt: Prompt, completion: str | Messages) -> Scored:
        """A prompt and its completion; ConfigError if they have too many tokens, or none."""
        if self.step_separator is not None:
            tokens, ends = self._steps(prompt, completion)
        else:
            whole = prompt + completion if isinstance(prompt, str) else joined(prompt, completion)
            tokens, ends = self.model.tokenizer.encode_whole(whole), []
            if not tokens:
                raise ConfigError(
                    f"the scorer {self.model.folder} reads no token in a prompt and completion without a character; "
                    "write at least one character into every prompt"
                )
            while len(tokens) > 1 and tokens[-1] == self.pad_token:
                tokens = tokens[:-1]
        if len(tokens) > self.model.context:
            raise ConfigError(
                f"the scorer {self.model.folder} reads at most {self.model.context} tokens (max_position_embeddings), "
                f"but a prompt with its completion has {len(tokens)}; shorten prompts, or lower max_completion"
            )
        return tokens, ends

    def _steps(self, prompt: Prompt, completion: str | Messages) -> Scored:
        """The prompt and each step of the completion, encoded apart; a step includes the separators at its end."""
        tokens, ends = self.model.tokenizer.encode(prompt), []
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        for step in re.finditer(rf".+?(?:(?:{re.escape(self.step_separator)})+|\Z)", text, re.DOTALL):
            tokens = tokens + self.model.tokenizer.encode_part(step[0])
            ends.append((step.end(), len(tokens) - 1))
        return tokens, ends

    def _values(self, rows: Sequence[list[int]]) -> list[np.ndarray]:
        """The scores after each token of texts, float32 `[L]` each, in batches of similar lengths."""
        values: list[np.ndarray] = [np.zeros(0, np.float32)] * len(rows)
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        for first in range(0, len(rows), self.batch_size):
            batch = order[first : first + self.batch_size]
            length = SHORTEST
            while length < len(rows[batch[-1]]):
                length *= 2
            tokens = np.full((self.batch_size, length), PAD, np.int32)
            for row, index in enumerate(batch):
                tokens[row, : len(rows[index])] = rows[index]
            scores = np.asarray(_scores(self.model.architecture, self.params, self.head, tokens))
            for row, index in enumerate(batch):
                values[index] = scores[row, : len(rows[index])]
        return values


def load_scorer(
    folder: str | Path,
    *,
    label: str | None = None,
    step_separator: str | None = None,
    batch_size: int = 16,
    date: str | None = None,
) -> Scorer:
    """The scorer in the folder of a LlamaForSequenceClassification or the like.

    Its score is the logit of a label at the last token.

    Args:
      folder: contains config.json, the weights with `score.weight`, and tokenizer.json.
      label: name (`id2label`) or number of the label whose logit is the score; needed if there are several.
      step_separator: ends a step, such as a line break; None: one score for the whole completion. Each step is encoded
        by itself, and its score is the one at its last token.
      batch_size: texts that are computed at once.
      date: see `load_tokenizer`.

    Raises:
      ConfigError: a file is missing, the folder has no scorer, its tokenizer is another model's, or the label is
        unknown.
    """
    folder, published = as_path(folder), read_config(folder)
    kinds = published.get("architectures") or ["a model without architectures in config.json"]
    if not any(kind.endswith("ForSequenceClassification") for kind in kinds):
        raise ConfigError(
            f"{folder} is no scorer but {', '.join(kinds)}; name a folder in the layout of transformers' "
            "AutoModelForSequenceClassification, such as LlamaForSequenceClassification"
        )
    if step_separator == "":
        raise ConfigError("step_separator is empty; write the text that ends a step, or leave it out")
    as_count("batch_size", batch_size)
    model = load_model(folder, date=date, tie_embeddings=True)  # there are no logits of tokens
    if (num_tokens := model.tokenizer.num_tokens) > model.vocab_size:
        raise ConfigError(
            f"{folder}: the tokenizer has {num_tokens} tokens, but the scorer vocab_size={model.vocab_size} of "
            "config.json; copy the tokenizer that the scorer was trained with"
        )
    params, head = load_scorer_params(folder)
    weights = head[_label_index(folder, published.get("id2label") or {}, len(head), label)]
    params, weights = jax.device_put((params, weights), jax.devices("cpu")[0])
    return Scorer(model, params, weights, published.get("pad_token_id"), step_separator, batch_size)


def load_reward_model(path: str, **options: Any) -> Reward:
    """The reward FOLDER or FOLDER=WEIGHT by a scorer, with the name of its folder; see `load_scorer`."""
    folder, weight = (path, 1.0) if as_path(path).exists() else read_weight(path)
    scorer = load_scorer(folder, **options)
    return Reward(as_path(folder).resolve().name, scorer, weight)


def _label_index(folder: Path, names: dict[str, str], num_labels: int, label: str | None) -> int:
    labels = [names.get(str(index), str(index)) for index in range(num_labels)]
    found = [index for index, name in enumerate(labels) if label in (None, name)]
    found = found or [index for index in range(num_labels) if str(index) == label]
    if len(found) == 1:
        return found[0]
    has = ("several labels" if found else "no label") + ("" if label is None else f" {label!r}")
    among = f"by its number: {' and '.join(map(str, found))}" if label in labels else f"of {', '.join(labels)}"
    raise ConfigError(f"the scorer {folder} has {has}; choose one {among}")


@functools.partial(jax.jit, static_argnums=0)
def _scores(architecture: Transformer, params: PyTree, head: jax.Array, tokens: jax.Array) -> jax.Array:
    """The scores after each token of texts `[N, L]`."""
    return jnp.einsum("nlw,w->nl", text_features(architecture, params, tokens), head)

"""Rewards by a model: a scorer from a folder in the layout of transformers' AutoModelForSequenceClassification."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.environments.tokens import PAD
from grpo_jax.errors import ConfigError
from grpo_jax.language.chat import Messages, joined
from grpo_jax.language.folder import read_config
from grpo_jax.language.models import LanguageModel, load_model
from grpo_jax.language.prompts import prompts_of
from grpo_jax.language.tokenizer import Prompt
from grpo_jax.language.weights import is_scorer, load_scorer_params
from grpo_jax.policies import Transformer
from grpo_jax.policies.token_policy import text_features
from grpo_jax.recording.files import as_path
from grpo_jax.types import PyTree

SHORTEST = 16
"""Texts are padded to this many tokens, or twice as many, and so on: a program is compiled for each length."""


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
    batch_size: int = 16
    """Texts that are computed at once."""

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[str | Messages]) -> list[float]:
        """The score of each completion; ConfigError if a text is longer than the scorer's context, or has no token."""
        texts = zip(prompts_of(prompts).contents, completions, strict=True)
        rows = [self._tokens(*text) for text in texts]
        scores, order = np.zeros(len(rows)), sorted(range(len(rows)), key=lambda index: len(rows[index]))
        for first in range(0, len(rows), self.batch_size):
            batch = order[first : first + self.batch_size]
            length = max(SHORTEST, 2 ** (len(rows[batch[-1]]) - 1).bit_length())
            tokens = np.full((self.batch_size, length), PAD, np.int32)
            for row, index in enumerate(batch):
                tokens[row, : len(rows[index])] = rows[index]
            found = _scores(self.model.architecture, self.params, self.head, tokens)
            scores[batch] = np.asarray(found)[: len(batch)]
        return scores.tolist()

    def check(self, prompt: Prompt, source: str) -> None:
        """Raises ConfigError, with the source, for a prompt that the scorer cannot read with any completion."""
        completion = "a" if isinstance(prompt, str) else [{"role": "assistant", "content": "a"}]
        try:
            self._tokens(prompt, completion)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error

    @property
    def identity(self) -> tuple:
        """What a resumed run compares."""
        return self.params, self.head, getattr(self.model.tokenizer.template, "dates", None)

    def _tokens(self, prompt: Prompt, completion: str | Messages) -> list[int]:
        """The tokens of a prompt and its completion; ConfigError if there are too many, or none."""
        whole = prompt + completion if isinstance(prompt, str) else joined(prompt, completion)
        tokens = self.model.tokenizer.encode_whole(whole)
        while len(tokens) > 1 and tokens[-1] == self.pad_token:
            tokens = tokens[:-1]
        if not 0 < len(tokens) <= self.model.context:
            raise ConfigError(
                f"the scorer {self.model.folder} reads 1 to {self.model.context} tokens (max_position_embeddings), but "
                f"a prompt with its completion has {len(tokens)}; change the prompt, or lower max_completion"
            )
        return tokens


def load_scorer(folder: str | Path, *, label: str | None = None, date: str | None = None) -> Scorer:
    """The scorer in the folder of a LlamaForSequenceClassification or the like.

    Its score is the logit of a label at the last token.

    Args:
      folder: contains config.json, the weights with `score.weight`, and tokenizer.json.
      label: name (`id2label`) or number of the label whose logit is the score; needed if there are several.
      date: see `load_tokenizer`.

    Raises:
      ConfigError: a file is missing, the folder has no scorer, or no such label.
    """
    folder, published = as_path(folder), read_config(folder)
    if not is_scorer(published):
        kinds = ", ".join(published.get("architectures") or ["a model without architectures in config.json"])
        layout = "name a folder in the layout of transformers' LlamaForSequenceClassification"
        raise ConfigError(f"{folder} is no scorer but {kinds}; {layout}")
    model = load_model(folder, date=date, tie_embeddings=True)  # there are no logits of tokens
    model.check_tokens(model.tokenizer.num_tokens - 1)
    params, head = load_scorer_params(folder)
    weights = head[_label_index(folder, published.get("id2label") or {}, len(head), label)]
    params, weights = jax.device_put((params, weights), jax.devices("cpu")[0])
    return Scorer(model, params, weights, published.get("pad_token_id"))


def _label_index(folder: Path, names: dict[str, str], num_labels: int, label: str | None) -> int:
    labels = {str(index): names.get(str(index), "") for index in range(num_labels)}
    found = [index for index, name in labels.items() if label in (None, name)] or [label]
    if len(found) > 1 or found[0] not in labels:
        asked = "" if label is None else f", and {label!r} is not exactly one of them"
        raise ConfigError(f"the scorer {folder} has the labels {labels}{asked}; choose one by its name or its number")
    return int(found[0])


@functools.partial(jax.jit, static_argnums=0)
def _scores(architecture: Transformer, params: PyTree, head: jax.Array, tokens: jax.Array) -> jax.Array:
    """The scores `[N]` at the last tokens of texts `[N, L]`, which `PAD` follows."""
    scores = jnp.einsum("nlw,w->nl", text_features(architecture, params, tokens), head)
    return scores[jnp.arange(len(tokens)), jnp.sum(tokens != PAD, axis=1) - 1]

"""Folders of published language models in the layout of Llama and Qwen, which complete texts.

model = load_model("Qwen3-0.6B", compute_dtype="bfloat16")
model.complete(["The capital of France is"])
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.devices.execution_plan import CPU, ExecutionPlan, resolve_plan
from grpo_jax.environments.tokens import PAD
from grpo_jax.errors import ConfigError, as_count
from grpo_jax.evaluation.generation import Sampling, generate
from grpo_jax.language.folder import as_architecture, describe_architecture, find_model, read_config
from grpo_jax.language.prompts import Prompts, encode_prompts, prompts_of
from grpo_jax.language.tokenizer import Prompt, Tokenizer, load_tokenizer, stop_moves
from grpo_jax.language.weights import load_params
from grpo_jax.policies import Policy, Transformer, categorical, make_token_policy
from grpo_jax.types import PyTree


def stopping_plan() -> ExecutionPlan:
    """The plan "auto", with rollouts that stop when all completions have ended: on a CPU a check costs nothing."""
    plan = resolve_plan("auto")
    return dataclasses.replace(plan, steps_per_check=4 if plan is CPU else 16)


class LanguageModel(NamedTuple):
    """A model folder, whose weights are read when they are needed."""

    folder: Path
    architecture: Transformer
    num_tokens: int  # of the tokenizer, at most vocab_size: others are never sampled
    context: int  # the most tokens of a prompt and its completion
    tokenizer: Tokenizer
    params: Callable[[], PyTree]  # reads the weights, once, with the adapter added to them
    adapter: Path | None = None  # the folder of an adapter (LoRA) of the weights in `folder`

    def check_tokens(self, largest: int) -> None:
        """Raises ConfigError if there are no embeddings of tokens up to this one."""
        if largest >= (size := self.architecture.vocab_size):
            size = f"the model only vocab_size={size}; it belongs to another model"
            raise ConfigError(f"{self.folder}: the tokenizer has the token {largest}, but {size}")

    def stops(self, strings: Sequence[str]) -> tuple[np.ndarray, np.ndarray] | None:
        """What finds texts that end a completion, see `stop_moves`; None without any."""
        if isinstance(strings, str) or not all(strings):
            raise ConfigError(f"stop_strings={strings!r} must be texts that are not empty, such as ('</a>',)")
        return stop_moves(strings, self.tokenizer, self.num_tokens) if strings else None

    def encode(self, prompts: Prompts, max_completion: int) -> np.ndarray:
        """The tokens of prompts, int32 `[N, P]`, -1 on the left; ConfigError for too many with their completions."""
        tokens, max_completion = encode_prompts(self.tokenizer, prompts), as_count("max_completion", max_completion)
        longest = (tokens != PAD).sum(axis=1).argmax()
        if (length := tokens.shape[1] + max_completion) > self.context:
            size = f"the prompt has {tokens.shape[1]} tokens, and {length} with a completion of {max_completion}"
            advice = f"more than the model's context of {self.context}; shorten it, or lower max_completion"
            raise ConfigError(f"{prompts.sources[longest]}: {size}, {advice}")
        self.check_tokens(tokens.max())
        return tokens

    def complete(
        self,
        prompts: Sequence[Prompt],
        key: jax.Array | None = None,
        *,
        num_samples: int | None = None,
        max_completion: int = 256,
        stop_strings: Sequence[str] = (),
        **sampling: Any,
    ) -> list[str] | list[list[str]]:
        """The texts with which the model goes on from prompts, all at once: `generate`, from texts to texts.

        Args:
          prompts: texts, or chats, which its template renders.
          key: of samples; None: the most probable tokens.
          num_samples: completions of each prompt; None: one, which is not in a list.
          max_completion: the most tokens of a completion.
          stop_strings: texts that end a completion, and stay in it, beside the model's end tokens.
          sampling: further fields of `Sampling`, such as `temperature=0.7` or `top_p=0.9`.
        """
        if key is None and (sampling or (num_samples or 1) > 1):
            raise ConfigError("samples need a key, such as jax.random.key(0); without it a prompt has one completion")
        prompts = prompts_of(prompts)
        tokens = self.encode(prompts, max_completion)
        sampling = {"temperature": 0} if key is None else sampling
        made = generate(
            _policy(self.architecture.without_lora, self.num_tokens, max_completion),
            self.params(),
            np.pad(tokens, [(0, 0), (-tokens.shape[1] % 16, 0)], constant_values=PAD),  # few lengths, few programs
            jax.random.key(0) if key is None else key,
            Sampling(
                num_samples=1 if num_samples is None else num_samples,
                end_token=self.tokenizer.end_tokens,
                stops=self.stops(stop_strings),
                **sampling,
            ),
            plan=stopping_plan(),
        )
        rows = zip(np.asarray(made.tokens), tokens, strict=True)
        texts = [[self.tokenizer.decode(row, before) for row in made] for made, before in rows]
        return [text for (text,) in texts] if num_samples is None else texts


@functools.lru_cache(maxsize=8)
def _policy(architecture: Transformer, num_tokens: int, max_completion: int) -> Policy:
    """The policy of a model, kept, as programs are compiled for one policy."""
    return make_token_policy(architecture, categorical(num_tokens), max_steps=max_completion)


def load_model(
    folder: str | Path, *, template_variables: Mapping[str, Any] | None = None, date: str | None = None, **changes: Any
) -> LanguageModel:
    """The architecture, the tokenizer and the limits of a model folder.

    Args:
      folder: contains config.json and tokenizer.json; or that of an adapter of such a model, or of a run with either.
      template_variables, date: of the chat template, see `load_tokenizer`.
      changes: fields of the `Transformer` to replace, such as `compute_dtype="bfloat16"`.

    Raises:
      ConfigError: a file is missing, the model has a feature that this transformer lacks, or no end token is known.
    """
    folder, adapter = find_model(folder)
    published = read_config(folder)
    tokenizer = load_tokenizer(folder, template_variables=template_variables, date=date)
    architecture, context = as_architecture(folder / "config.json", published, **changes)
    num_tokens = min(tokenizer.num_tokens, architecture.vocab_size)
    params = functools.cache(lambda: load_params(adapter or folder))
    model = LanguageModel(folder, architecture, num_tokens, context, tokenizer, params, adapter)
    model.check_tokens(max(tokenizer.end_tokens))
    return model


def changed_fields(model: LanguageModel, vocab_size: int) -> dict[str, Any]:
    """The fields of config.json for a model that differs from its folder's; empty if it does not differ."""
    published = read_config(model.folder)
    before, context = as_architecture(model.folder / "config.json", published)
    found = describe_architecture(before, vocab_size=before.vocab_size, context=context)
    fields = describe_architecture(model.architecture, vocab_size=vocab_size, context=model.context)
    # transformers 5 also reads positions as they are described here.
    return {} if fields == found else fields | {"rope_parameters": None}

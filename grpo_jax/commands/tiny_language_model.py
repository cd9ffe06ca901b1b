"""A tiny language model with random weights, as a folder: `grpo-jax tiny-language-model --out tiny`."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import jax

from grpo_jax.commands.harness.command import command
from grpo_jax.commands.harness.limits import Between, Count, Seed
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.errors import LARGEST_COUNT, ConfigError
from grpo_jax.language import read_prompts, save_model
from grpo_jax.language.models import MODEL_TYPES
from grpo_jax.policies import Transformer, categorical, make_token_policy

VocabularySize = Annotated[int, Between(258, LARGEST_COUNT, "a whole number of at least 258: all bytes, and 2 more")]
END, BEGIN = "<|im_end|>", "<|im_start|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclasses.dataclass(kw_only=True)
class Arguments:
    """Makes a folder like a published model's: a byte-level BPE of the prompts' text, and random weights."""

    out: Path
    """The folder to write."""
    prompts: Path
    """JSON lines, whose texts the tokenizer is trained on."""
    model_type: Literal["llama", "qwen2", "qwen3"] = "qwen3"
    """The layout of the model."""
    num_layers: Count = 2
    """Transformer blocks."""
    width: Count = 64
    """Width of the residual stream."""
    num_heads: Count = 4
    """Attention heads of each block; half as many of keys and values."""
    vocab_size: VocabularySize = 512
    """The most tokens, at least the 256 bytes and the special tokens."""
    context: Count = 512
    """The most tokens of a prompt and its completion."""
    seed: Seed = 0
    """Seed of the weights."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """A byte-level BPE with the special tokens of `CHAT_TEMPLATE`, as a `tokenizers.Tokenizer`.

    Each digit is a token, as in Qwen: a number of several digits is read and written digit by digit.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, BEGIN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main(arguments: Arguments) -> None:
    if (arguments.out / "config.json").exists():
        raise ConfigError(f"{arguments.out} already has a model; name another folder (--out)")
    prompts = read_prompts(arguments.prompts)
    texts = [
        json.dumps([content, *fields], ensure_ascii=False)
        for content, *fields in zip(prompts.contents, *prompts.fields.values(), strict=True)
    ]
    tokenizer = train_tokenizer(texts, arguments.vocab_size)
    architecture = Transformer(
        num_layers=arguments.num_layers,
        width=arguments.width,
        num_heads=arguments.num_heads,
        num_kv_heads=max(1, arguments.num_heads // 2),
        tie_embeddings=True,
        **MODEL_TYPES[arguments.model_type],
    )
    policy = make_token_policy(architecture, categorical(tokenizer.get_vocab_size()), max_steps=1)
    params = jax.jit(policy.init)(jax.random.key(arguments.seed))
    save_model(
        *(arguments.out, architecture, params, tokenizer),
        end_token=END,
        context=arguments.context,
        chat_template=CHAT_TEMPLATE,
    )
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"{arguments.out}: {size:,} weights, {tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

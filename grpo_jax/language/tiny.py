"""A tiny language model with random weights, as a folder like a published one's."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from grpo_jax.errors import ConfigError
from grpo_jax.language.saving import save_model
from grpo_jax.policies import Transformer, categorical, make_token_policy

END, BEGIN = "<|im_end|>", "<|im_start|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(
    folder: str | Path,
    texts: Iterable[str],
    *,
    num_layers: int = 2,
    width: int = 64,
    vocab_size: int = 512,
    context: int = 512,
    seed: int = 0,
) -> None:
    """Writes a model folder, to try things out: random weights, and a byte-level BPE of the texts.

    Args:
      folder: the folder to write; ConfigError if it has a model already.
      texts: what the tokenizer is trained on.
      num_layers, width: of the transformer, a Qwen3 with 4 heads.
      vocab_size: the most tokens, at least the 256 bytes and the two special tokens.
      context: the most tokens of a prompt and its completion.
      seed: of the weights.
    """
    if (Path(folder) / "config.json").exists():
        raise ConfigError(f"{folder} already has a model; name another folder")
    tokenizer = train_tokenizer(texts, vocab_size)
    sizes = {"num_layers": num_layers, "width": width, "num_heads": 4, "num_kv_heads": 2}
    architecture = Transformer(**sizes, tie_embeddings=True, qk_norm=True)
    policy = make_token_policy(architecture, categorical(tokenizer.get_vocab_size()), max_steps=1)
    params = jax.jit(policy.init)(jax.random.key(seed))
    save_model(folder, architecture, params, tokenizer, end_token=END, context=context, chat_template=CHAT_TEMPLATE)


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

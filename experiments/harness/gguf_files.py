"""A model folder from a GGUF file of llama.cpp: of a Llama with SmolLM's tokenizer."""

from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.errors import ConfigError
from grpo_jax.language import save_model
from grpo_jax.language.weights import read_params
from grpo_jax.policies import Transformer


def convert_gguf(path: str | Path, folder: str | Path) -> None:
    """Writes the folder of the model in a file: dequantised weights, the tokenizer, the chat template."""
    from gguf import MODEL_ARCH, GGUFReader, dequantize, get_tensor_name_map

    reader = GGUFReader(path)
    field = {name: value.contents() for name, value in reader.fields.items()}
    kinds = field["general.architecture"], field["tokenizer.ggml.pre"]
    if kinds != ("llama", "smollm"):
        raise ConfigError(f"{path} has the architecture and the tokenizer {kinds}, but only ('llama', 'smollm') are")
    found, tokens = {tensor.name: tensor for tensor in reader.tensors}, field["tokenizer.ggml.tokens"]
    sizes = {
        **{"num_layers": "block_count", "width": "embedding_length", "feedforward_size": "feed_forward_length"},
        **{"num_heads": "attention.head_count", "num_kv_heads": "attention.head_count_kv"},
        "rope_base": "rope.freq_base",
    }
    architecture = Transformer(
        vocab_size=len(tokens),
        tie_embeddings="output.weight" not in found,
        # A float32 as its shortest decimal: 1e-5, not 9.999999747378752e-06.
        norm_eps=float(str(np.float32(field["llama.attention.layer_norm_rms_epsilon"]))),
        **{ours: field[f"llama.{theirs}"] for ours, theirs in sizes.items()},
    )
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, architecture.num_layers)
    heads = {"q_proj": architecture.sizes.heads, "k_proj": architecture.sizes.kv_heads}

    def tensor(name):
        stored, layer = found[names.get_name(name, try_suffixes=(".weight",))], name.split(".")[-2]
        array = np.asarray(dequantize(stored.data, stored.tensor_type), np.float32)
        if layer in heads:  # llama.cpp rotates neighbours, transformers the two halves of a head
            array = array.reshape(heads[layer], -1, 2, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        return array

    special = {name: tokens[field[f"tokenizer.ggml.{name}_token_id"]] for name in ("bos", "eos")}
    save_model(
        folder,
        architecture,
        read_params(Path(path), architecture, tensor),
        _tokenizer(tokens, field),
        end_token=special["eos"],
        context=field["llama.context_length"],
        chat_template=field["tokenizer.chat_template"],
        special_tokens={"bos_token": special["bos"]},
    )


def _tokenizer(tokens: list[str], field: dict[str, Any]) -> Any:
    """The byte-level BPE, to which each digit is a token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    merges = [tuple(merge.split(" ")) for merge in field["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence(parts), decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, field["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer

"""Model folders from files of llama.cpp (GGUF): weights, architecture, tokenizer, chat template."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.errors import ConfigError
from grpo_jax.language.folder import as_config_error, need
from grpo_jax.language.models import MODEL_TYPES, as_architecture
from grpo_jax.language.saving import save_model
from grpo_jax.language.weights import read_params
from grpo_jax.policies import Transformer
from grpo_jax.recording.files import as_path, describe_kind, fits

# Fields of config.json, by those that follow the architecture's name in a file.
_FIELDS = {
    **{"block_count": "num_hidden_layers", "embedding_length": "hidden_size"},
    **{"feed_forward_length": "intermediate_size", "attention.key_length": "head_dim"},
    **{"attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads"},
    **{"rope.freq_base": "rope_theta", "attention.layer_norm_rms_epsilon": "rms_norm_eps"},
    "context_length": "max_position_embeddings",
}

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Where a text is cut before merges, by `tokenizer.ggml.pre`: digits one by one and GPT-2's pattern, or a pattern.
_PRE_TOKENIZERS = {"gpt-2": None, "smollm": None, "qwen2": _WORDS % "", "llama-bpe": _WORDS % "{1,3}"}

_SPECIAL = {"bos": "bos", "eos": "eos", "eot": "eot", "pad": "padding", "unk": "unknown"}

_CONTROL, _USER_DEFINED = 3, 4  # of `tokenizer.ggml.token_type`


def convert_gguf(path: str | Path, folder: str | Path, *, dtype: str = "float32") -> None:
    """Writes the folder of a model in a GGUF file, for `load_model` and transformers: all its files, or none.

    Args:
      path: the file, of a Llama, Qwen2 or Qwen3 with a byte-level BPE. Quantised weights become floats.
      folder: created if it does not exist.
      dtype: of the saved weights, "float32" or "bfloat16".

    Raises:
      ConfigError: the file is damaged or of a kind that is not supported, or the folder has a model already.
    """
    if (as_path(folder) / "config.json").exists():
        raise ConfigError(f"{folder} already has a model; name another folder")
    path = as_path(path)
    reader, field = _open(path)
    tokens = field("tokenizer.ggml.tokens", list[str])
    numbers = {name: field(f"tokenizer.ggml.{theirs}_token_id", int, -1) for name, theirs in _SPECIAL.items()}
    architecture, context = _architecture(path, field, {tensor.name: tensor.shape for tensor in reader.tensors})
    if not len(tokens) == architecture.vocab_size > max(numbers.values()):
        size = f"but the model {architecture.vocab_size}; it belongs to another model, so download another file"
        raise ConfigError(f"{path}: the tokenizer has {len(tokens)} tokens, among them {numbers}, {size}")
    special = {name: tokens[number] for name, number in numbers.items() if number >= 0}
    ends = list(dict.fromkeys(special[name] for name in ("eos", "eot") if name in special))
    if not ends:
        raise ConfigError(f"{path} names no end token, so completions would never end; download another file")
    save_model(
        folder,
        architecture,
        _params(path, reader, architecture),
        _tokenizer(path, field, tokens, special.get("bos")),
        end_token=ends,
        context=context,
        chat_template=field("tokenizer.chat_template", str, "") or None,
        special_tokens={f"{name}_token": special[name] for name in ("bos", "pad", "unk") if name in special},
        dtype=dtype,
    )


def _open(path: Path) -> tuple[Any, Callable[..., Any]]:
    """A `gguf.GGUFReader`, which maps the weights into memory, and `(name, kind, default) -> value` of its fields."""
    gguf, advice = need("gguf"), "or its quantisation is newer than the package: pip install --upgrade gguf"
    with as_config_error(f"{path} cannot be read as GGUF: %s; missing, cut off or damaged: download it, {advice}"):
        reader = gguf.GGUFReader(path)

    def field(name, kind, default=None):
        found = reader.fields[name].contents() if name in reader.fields else default
        if not fits(found, kind):
            raise ConfigError(f"{path}: {name}={found!r:.80} must be {describe_kind(kind)}; download the file again")
        return found

    return reader, field


def _architecture(path: Path, field: Callable[..., Any], tensors: dict[str, Any]) -> tuple[Transformer, int]:
    """The transformer and the context; ConfigError for one that is not supported."""
    name = field("general.architecture", str)
    if name not in MODEL_TYPES or "token_embd.weight" not in tensors:
        known = ", ".join(MODEL_TYPES)
        raise ConfigError(f"{path}: the architecture {name!r} is not supported; use a whole model of one of {known}")
    published = {ours: field(f"{name}.{theirs}", Any) for theirs, ours in _FIELDS.items()}
    for ours in ("rope_theta", "rms_norm_eps"):
        if fits(published[ours], float):  # a float32 as its shortest decimal: 1e-5, not 9.999999747378752e-06
            published[ours] = float(str(np.float32(published[ours])))
    scaling = "rope_freqs" if "rope_freqs.weight" in tensors else field(f"{name}.rope.scaling.type", str, "none")
    published |= {"model_type": name, "vocab_size": int(tensors["token_embd.weight"][-1])}
    published |= {"tie_word_embeddings": "output.weight" not in tensors}
    published |= {"rope_parameters": {"rope_type": "default" if scaling == "none" else scaling}}
    architecture, context = as_architecture(path, published)
    size = architecture.sizes.head
    if (rotated := field(f"{name}.rope.dimension_count", int, size)) != size:
        raise ConfigError(f"{path}: rotary positions of {rotated} of {size} features of a head are not supported")
    return architecture, context


def _params(path: Path, reader: Any, architecture: Transformer) -> Any:
    """The weights as parameters of the policy."""
    from gguf import MODEL_ARCH, dequantize, get_tensor_name_map

    kind, size = reader.fields["general.architecture"].contents(), architecture.sizes
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    names = get_tensor_name_map(MODEL_ARCH[kind.upper()], architecture.num_layers)
    read, heads = set(), {"q_proj": size.heads, "k_proj": size.kv_heads} if kind == "llama" else {}

    def tensor(name):
        theirs, layer = names.get_name(name, try_suffixes=(".weight", ".bias")), name.split(".")[-2]
        if theirs not in tensors:
            raise ConfigError(f"{path} lacks the tensor {theirs}, which its fields imply; download the file again")
        read.add(theirs)
        found = tensors[theirs]
        about = f"{path}: the quantisation {found.tensor_type.name} of {theirs}"
        with as_config_error(f"{about} is not supported (%s); use a file in another, such as Q8_0 or F16"):
            array = np.asarray(dequantize(found.data, found.tensor_type), np.float32)
        if layer in heads and len(array) % (2 * heads[layer]) == 0:
            # llama.cpp rotates neighbours, transformers the two halves of a head.
            array = array.reshape(heads[layer], -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        return array

    params = read_params(path, architecture, tensor)
    if unread := sorted(tensors.keys() - read):
        raise ConfigError(f"{path} has tensors that {architecture} lacks: {', '.join(unread[:5])}")
    return params


def _tokenizer(path: Path, field: Callable[..., Any], tokens: list[str], begin: str | None) -> Any:
    """The byte-level BPE as a `tokenizers.Tokenizer`."""
    need("tokenizers")
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    kind, before = field("tokenizer.ggml.model", str), field("tokenizer.ggml.pre", str, "none")
    if kind != "gpt2" or before not in _PRE_TOKENIZERS:
        only = f"only 'gpt2' with one of {', '.join(_PRE_TOKENIZERS)}; use the model's folder as published instead"
        raise ConfigError(f"{path}: the tokenizer {kind!r} with the pre-tokenizer {before!r} is not supported, {only}")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges", list[str])]
    with as_config_error(f"{path}: the tokenizer's merges do not fit its vocabulary (%s); download the file again"):
        vocabulary = {token: number for number, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=before == "llama-bpe"))
    pattern = _PRE_TOKENIZERS[before]
    parts = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    if before == "smollm":
        parts = [pre_tokenizers.Digits(individual_digits=True)]
    if before == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence(parts), decoders.ByteLevel()
    kinds = field("tokenizer.ggml.token_type", list[int], [])
    for chosen in (_CONTROL, _USER_DEFINED):
        added = [token for token, each in zip(tokens, kinds, strict=False) if each == chosen]
        is_special = chosen == _CONTROL
        tokenizer.add_tokens([AddedToken(token, special=is_special, normalized=False) for token in added])
    if field("tokenizer.ggml.add_bos_token", bool, False) and begin is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[begin, "$A"], pair=[begin, "$A", "$B"], special_tokens=[(begin, vocabulary[begin])]
        )
    return tokenizer

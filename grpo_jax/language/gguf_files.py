"""Model folders from files of llama.cpp (GGUF): weights, architecture, tokenizer, chat template."""

import importlib.metadata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.errors import ConfigError, as_count
from grpo_jax.language.folder import need
from grpo_jax.language.models import MODEL_TYPES, describe_architecture
from grpo_jax.language.saving import model_files
from grpo_jax.language.weights import WEIGHTS, finite, published_weights
from grpo_jax.policies import Transformer, categorical, make_token_policy
from grpo_jax.policies.transformer import DTYPES
from grpo_jax.recording.files import as_path, write_arrays, write_json

# Names of tensors, by those of transformers.
_NAMES = {
    **{"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"},
    **{"model.layers": "blk", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{"self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Where a text is cut before merges, by `tokenizer.ggml.pre`: digits one by one and GPT-2's pattern, or a pattern.
_PRE_TOKENIZERS = {"gpt-2": None, "smollm": None, "qwen2": _WORDS % "", "llama-bpe": _WORDS % "{1,3}"}

_KIND = "general.architecture"
_CONTROL, _USER_DEFINED = 3, 4  # of `tokenizer.ggml.token_type`


def convert_gguf(path: str | Path, folder: str | Path, *, dtype: str = "float32") -> None:
    """Writes the folder of a model in a GGUF file, for `load_model` and transformers: all its files, or none.

    Args:
      path: the file, of a Llama, Qwen2 or Qwen3 with a byte-level BPE. Quantised weights become floats.
      folder: created if it does not exist.
      dtype: of the saved weights, "float32" or "bfloat16".

    Raises:
      ConfigError: the file is damaged, its architecture, quantisation or tokenizer is not supported, or the folder has
        a model already.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r}; use one of {', '.join(DTYPES)}")
    if (as_path(folder) / "config.json").exists():
        raise ConfigError(f"{folder} already has a model; name another folder")
    path = as_path(path)
    reader = _open(path)
    field = _fields(path, reader)
    architecture, context = _architecture(path, field, {tensor.name: tensor.shape for tensor in reader.tensors})
    tokenizer = _tokenizer(path, field)
    tokens, size = field("tokenizer.ggml.tokens", list), architecture.vocab_size
    if len(tokens) != size:
        raise ConfigError(
            f"{path}: the tokenizer has {len(tokens)} tokens, but the model {size}; it belongs to another model, so "
            "convert the published model again, or download another file"
        )
    special = _special_tokens(path, field, size)
    ends = sorted({special[name] for name in ("eos", "eot") if name in special})
    if not ends:
        raise ConfigError(f"{path} names no end token, so completions would never end; download another file")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context}
    about |= {"clean_up_tokenization_spaces": False}
    about |= {f"{name}_token": tokens[number] for name, number in special.items() if name != "eot"}
    if (template := field("tokenizer.chat_template", str, "")) != "":
        about["chat_template"] = template
    numbers = {"bos_token_id": special.get("bos"), "eos_token_id": ends if len(ends) > 1 else ends[0]}
    numbers["pad_token_id"] = special.get("pad", ends[0])
    description = describe_architecture(architecture, vocab_size=size, context=context) | numbers
    with model_files(as_path(folder)) as new:
        (new / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
        write_json(new / "tokenizer_config.json", about)
        write_json(new / "generation_config.json", numbers)
        write_json(new / "config.json", description | {"dtype": dtype, "torch_dtype": dtype})
        write_arrays(new / WEIGHTS, dict(_weights(path, reader, architecture, dtype)), {"format": "pt"})


def gguf_in_package(package: str) -> Path:
    """The only GGUF file of an installed package; ConfigError if there is none, or several."""
    try:
        files = importlib.metadata.files(package) or []
    except (importlib.metadata.PackageNotFoundError, ValueError) as error:
        raise ConfigError(f"the package {package!r} is not installed: pip install {package}") from error
    found = [str(file.locate()) for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        several = f"has several GGUF files; give one of them: {', '.join(found)}"
        raise ConfigError(f"the package {package!r} {several if found else 'has no GGUF file; name another package'}")
    return Path(found[0])


def _open(path: Path) -> Any:
    """A `gguf.GGUFReader`, which maps the weights into memory."""
    gguf = need("gguf")
    try:
        return gguf.GGUFReader(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; name a GGUF file") from error
    except Exception as error:  # of NumPy and of Python, at whatever is damaged
        raise ConfigError(
            f"{path} cannot be read as GGUF: {error}; the file is cut off or damaged, so download it again, or its "
            "quantisation is newer than the installed package: pip install --upgrade gguf"
        ) from error


def _fields(path: Path, reader: Any) -> Callable[..., Any]:
    """The function `(name, kind, default) -> value` of the file's fields; ConfigError for one of another type."""

    def field(name, kind, default=None):
        found = reader.fields[name].contents() if name in reader.fields else default
        if found is None:
            raise ConfigError(f"{path} lacks the field {name}; convert the published model again")
        if not isinstance(found, kind) and not (kind is float and isinstance(found, int)):
            raise ConfigError(f"{path}: {name}={str(found)[:80]!r} is of another type than GGUF has; download it again")
        return found

    return field


def _architecture(path: Path, field: Callable[..., Any], tensors: dict[str, Any]) -> tuple[Transformer, int]:
    """The transformer, and the most tokens of a prompt and its completion."""
    name = field(_KIND, str)
    if name not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise ConfigError(f"{path}: the architecture {name!r} is not supported; use a model of one of {known}")
    scaling = field(f"{name}.rope.scaling.type", str, "none")
    if scaling != "none" or "rope_freqs.weight" in tensors:
        raise ConfigError(f"{path}: scaled rotary positions are not supported ({scaling}); use a model without")
    if "token_embd.weight" not in tensors:
        raise ConfigError(f"{path} lacks the tensor token_embd.weight; name the file of a whole model")
    num_heads, width = field(f"{name}.attention.head_count", int), field(f"{name}.embedding_length", int)
    try:
        head_size = field(f"{name}.attention.key_length", int, width // max(num_heads, 1))
        if (rotated := field(f"{name}.rope.dimension_count", int, head_size)) != head_size:
            raise ConfigError(f"rotary positions of {rotated} of {head_size} features of a head are not supported")
        architecture = Transformer(
            num_layers=field(f"{name}.block_count", int),
            width=width,
            feedforward_size=field(f"{name}.feed_forward_length", int),
            num_heads=num_heads,
            num_kv_heads=field(f"{name}.attention.head_count_kv", int, num_heads),
            head_size=head_size,
            rope_base=_decimal(field(f"{name}.rope.freq_base", float, 10_000.0)),
            norm_eps=_decimal(field(f"{name}.attention.layer_norm_rms_epsilon", float)),
            tie_embeddings="output.weight" not in tensors,
            vocab_size=int(tensors["token_embd.weight"][-1]),
            **MODEL_TYPES[name],
        )
    except ConfigError as error:
        raise error if str(path) in str(error) else ConfigError(f"{path}: {error}") from error
    return architecture, as_count(f"{path}: {name}.context_length", field(f"{name}.context_length", int))


def _decimal(number: float) -> float:
    """A float32 as its shortest decimal: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(number)))


def _weights(path: Path, reader: Any, architecture: Transformer, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors by the names of transformers."""
    from gguf import dequantize

    tensors, size = {tensor.name: tensor for tensor in reader.tensors}, architecture.sizes
    heads = {"q_proj": size.heads, "k_proj": size.kv_heads} if reader.fields[_KIND].contents() == "llama" else {}
    policy = make_token_policy(architecture, categorical(architecture.vocab_size), max_steps=1)
    shapes = jax.eval_shape(lambda: published_weights(architecture, policy.init(jax.random.key(0))))
    for name, expected in shapes.items():
        theirs = name
        for published, short in _NAMES.items():
            theirs = theirs.replace(published, short)
        if theirs not in tensors:
            raise ConfigError(f"{path} lacks the tensor {theirs}, which its fields imply; download the file again")
        tensor, layer = tensors.pop(theirs), name.split(".")[-2]
        try:
            array = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        except NotImplementedError as error:
            raise ConfigError(
                f"{path}: the quantisation {tensor.tensor_type.name} of {theirs} is not supported ({error}); use a "
                "file in another, such as Q8_0 or F16"
            ) from error
        if array.shape != expected.shape:
            raise ConfigError(f"{path}: {theirs} is {array.shape} instead of {expected.shape}; download the file again")
        if layer in heads:
            # llama.cpp rotates neighbours, transformers the two halves of a head.
            array = array.reshape(heads[layer], -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        yield name, finite(array, f"{path}: {theirs}").astype(jnp.dtype(dtype))
    if tensors:
        raise ConfigError(f"{path} has tensors that {architecture} lacks: {', '.join(sorted(tensors)[:5])}")


def _special_tokens(path: Path, field: Callable[..., Any], size: int) -> dict[str, int]:
    """The numbers of the special tokens that the file names."""
    names = {"bos": "bos", "eos": "eos", "eot": "eot", "pad": "padding", "unk": "unknown"}
    found = {ours: field(f"tokenizer.ggml.{theirs}_token_id", int, -1) for ours, theirs in names.items()}
    if wrong := {name: number for name, number in found.items() if number >= size}:
        raise ConfigError(f"{path}: of {size} tokens, {wrong} are none; its tokenizer belongs to another model")
    return {name: number for name, number in found.items() if number >= 0}


def _tokenizer(path: Path, field: Callable[..., Any]) -> Any:
    """The byte-level BPE as a `tokenizers.Tokenizer`."""
    need("tokenizers")
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    kind, before = field("tokenizer.ggml.model", str), field("tokenizer.ggml.pre", str, "none")
    if kind != "gpt2" or before not in _PRE_TOKENIZERS:
        raise ConfigError(
            f"{path}: the tokenizer {kind!r} with the pre-tokenizer {before!r} is not supported, only 'gpt2' with one "
            f"of {', '.join(_PRE_TOKENIZERS)}; use the model's folder as published instead"
        )
    tokens, merges = field("tokenizer.ggml.tokens", list), field("tokenizer.ggml.merges", list)
    kinds = field("tokenizer.ggml.token_type", list, [1] * len(tokens))
    try:
        pairs = [tuple(merge.split(" ")) for merge in merges]
        vocabulary = {token: number for number, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=before == "llama-bpe"))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # `tokenizers` may panic, which is no Exception
        raise ConfigError(
            f"{path}: the tokenizer's merges do not fit its vocabulary ({error}); they belong to another model, so "
            "download the file again"
        ) from error
    pattern = _PRE_TOKENIZERS[before]
    parts = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    if before == "smollm":
        parts = [pre_tokenizers.Digits(individual_digits=True)]
    if before == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence(parts), decoders.ByteLevel()
    for special in (True, False):
        chosen = _CONTROL if special else _USER_DEFINED
        added = [token for token, each in zip(tokens, kinds, strict=False) if each == chosen]
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in added])
    if field("tokenizer.ggml.add_bos_token", bool, False):
        number = _special_tokens(path, field, len(tokens)).get("bos", 0)
        begin = tokens[number]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[begin, "$A"], pair=[begin, "$A", "$B"], special_tokens=[(begin, number)]
        )
    return tokenizer

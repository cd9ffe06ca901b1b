"""Folders of published language models in the layout of Llama and Qwen: config.json and the tokenizer's files.

model = load_model("Qwen3-0.6B", compute_dtype="bfloat16")
params = load_params(model.folder)  # {"actor": ...}, of a policy with model.architecture
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from grpo_jax.errors import ConfigError, as_count
from grpo_jax.language.folder import read_config
from grpo_jax.language.tokenizer import Tokenizer, load_tokenizer
from grpo_jax.policies import Transformer
from grpo_jax.recording.files import as_path

# For each supported `model_type`: fields of `Transformer` beyond the sizes.
MODEL_TYPES = {
    "llama": {},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True},
}
UNLIMITED = 2**31 - 1  # the context of a model whose config.json names none

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

# Fields of config.json, and of `Transformer`.
_FIELDS = {
    **{"num_hidden_layers": "num_layers", "hidden_size": "width", "intermediate_size": "feedforward_size"},
    **{"num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads", "head_dim": "head_size"},
    **{"rope_theta": "rope_base", "rms_norm_eps": "norm_eps", "tie_word_embeddings": "tie_embeddings"},
    "vocab_size": "vocab_size",
}

# Fields of config.json with one supported value, which they may also leave out.
_SUPPORTED = {
    **{"hidden_act": "silu", "use_sliding_window": False, "quantization_config": None},
    **{"partial_rotary_factor": 1.0, "attention_bias": False, "mlp_bias": False},
}


class LanguageModel(NamedTuple):
    """A model folder, without its weights."""

    folder: Path
    architecture: Transformer
    num_tokens: int  # of the tokenizer, at most vocab_size: others are never sampled
    context: int  # the most tokens of a prompt and its completion
    tokenizer: Tokenizer

    @property
    def vocab_size(self) -> int:
        """Rows of the token embeddings."""
        return self.architecture.vocab_size

    def check_tokens(self, largest: int) -> None:
        """Raises ConfigError if there are no embeddings of tokens up to this one."""
        if largest >= self.vocab_size:
            size = f"the model only vocab_size={self.vocab_size}; it belongs to another model"
            raise ConfigError(f"{self.folder}: the tokenizer has the token {largest}, but {size}")


def load_model(
    folder: str | Path,
    *,
    template_variables: Mapping[str, Any] | None = None,
    date: str | None = None,
    **changes: Any,
) -> LanguageModel:
    """The architecture, the tokenizer and the limits of a model folder.

    Args:
      folder: contains config.json and tokenizer.json.
      template_variables, date: of the chat template, see `load_tokenizer`.
      changes: fields of the `Transformer` to replace, such as `compute_dtype="bfloat16"`.

    Raises:
      ConfigError: a file is missing, the model has a feature that this transformer lacks, or no end token is known.
    """
    folder = as_path(folder)
    published = read_config(folder)
    tokenizer = load_tokenizer(folder, template_variables=template_variables, date=date)
    architecture, context = as_architecture(folder / "config.json", published, **changes)
    num_tokens = min(tokenizer.num_tokens, architecture.vocab_size)
    model = LanguageModel(folder, architecture, num_tokens, context, tokenizer)
    model.check_tokens(max(tokenizer.end_tokens))
    return model


def load_architecture(folder: str | Path, **changes: Any) -> Transformer:
    """The sizes of a checkpoint's transformer: `Config(network=load_architecture(folder))`.

    Args:
      folder: contains config.json; ConfigError if it has a feature that this transformer lacks, or is damaged.
      changes: fields of the `Transformer` to replace, such as `compute_dtype="bfloat16"`.
    """
    return as_architecture(as_path(folder) / "config.json", read_config(folder), **changes)[0]


def as_architecture(path: Path, published: Mapping[str, Any], **changes: Any) -> tuple[Transformer, int]:
    """The transformer and the context that fields of config.json describe, which come from this path."""
    model_type = published.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ConfigError(f"{path}: model_type={model_type!r} is not supported; use one of {', '.join(MODEL_TYPES)}")
    if missing := [field for field in _REQUIRED if published.get(field) is None]:
        raise ConfigError(f"{path} lacks {', '.join(missing)}; copy the file of the published model again")
    for field in (*_REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings"):
        if published.get(field) is not None:
            as_count(f"{path}: {field}", published[field])
    for field, supported in _SUPPORTED.items():
        if published.get(field, supported) != supported:
            raise ConfigError(f"{path}: {field}={published[field]!r} is not supported, only {supported!r}")
    rope = published.get("rope_parameters") or published.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default" or rope.get("partial_rotary_factor", 1.0) != 1:
        raise ConfigError(f"{path}: scaled rotary positions are not supported: {rope}; use a checkpoint without")
    if other := set(published.get("layer_types") or []) - {"full_attention"}:
        raise ConfigError(f"{path}: layer_types has {sorted(other)[0]!r}, and only 'full_attention' is supported")
    given = {"rope_theta": rope.get("rope_theta")}
    given |= {name: value for name, value in published.items() if value is not None}
    fields = {field: given[name] for name, field in _FIELDS.items() if given.get(name) is not None}
    try:
        architecture = Transformer(**fields | MODEL_TYPES[model_type] | changes)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return architecture, given.get("max_position_embeddings", UNLIMITED)


def describe_architecture(architecture: Transformer, *, vocab_size: int, context: int) -> dict[str, Any]:
    """The fields of config.json for this architecture; ConfigError if no published model type has its variants."""
    variants = {name: getattr(architecture, name) for fields in MODEL_TYPES.values() for name in fields}
    types = [name for name, fields in MODEL_TYPES.items() if dict.fromkeys(variants, False) | fields == variants]
    if not types:
        raise ConfigError(f"no published model type has {variants}; use one of {MODEL_TYPES}")
    size = architecture.sizes
    return {
        **{"model_type": types[0], "architectures": [f"{types[0].capitalize()}ForCausalLM"], "hidden_act": "silu"},
        **{name: getattr(architecture, field) for name, field in _FIELDS.items()},
        **{"num_attention_heads": size.heads, "num_key_value_heads": size.kv_heads, "head_dim": size.head},
        **{"intermediate_size": size.feedforward, "max_position_embeddings": context, "vocab_size": vocab_size},
    }


def changed_fields(model: LanguageModel, vocab_size: int) -> dict[str, Any]:
    """The fields of config.json for a model that differs from its folder's; empty if it does not differ."""
    published = read_config(model.folder)
    before, context = as_architecture(model.folder / "config.json", published)
    found = describe_architecture(before, vocab_size=before.vocab_size, context=context)
    fields = describe_architecture(model.architecture, vocab_size=vocab_size, context=model.context)
    if fields == found:
        return {}
    if rope := published.get("rope_parameters"):  # where transformers 5 looks
        fields["rope_parameters"] = rope | {"rope_theta": fields["rope_theta"]}
    return fields

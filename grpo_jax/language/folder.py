"""What reads a model folder: its files, the fields of config.json, and the packages of the extra `lm`."""

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_jax.errors import ConfigError, as_count
from grpo_jax.importing import pip_install
from grpo_jax.policies import Transformer
from grpo_jax.recording.files import as_path, describe_kind, fits, read_json

FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json"),
)
"""The files of a model folder that belong to its tokenizer and are copied with it."""

CONFIG, ADAPTER, _BASE = "config.json", "adapter_config.json", "base_model_name_or_path"

# For each supported `model_type`: fields of `Transformer` beyond the sizes.
MODEL_TYPES = {
    "llama": {},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True},
    "smollm3": {"no_rope_interval": 4},
}
_CLASSES = {"smollm3": "SmolLM3ForCausalLM"}  # where it is not the capitalised type
_TIED = ("smollm3",)  # types whose config.json leaves out tie_word_embeddings where it is true
# For each type of rotary positions: the numbers of config.json, in the order of `Transformer.rope_scaling`.
_ROPE_TYPES = {
    **{"default": (), "linear": ("factor",)},
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
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
    **{"partial_rotary_factor": 1.0, "attention_bias": False, "mlp_bias": False, "no_rope_layer_interval": 4},
}

# The types of fields of config.json, besides its sizes.
_KINDS = {
    **{"model_type": str, "architectures": list[str], "tie_word_embeddings": bool, "layer_types": list[str]},
    **{"rope_parameters": dict[str, Any], "rope_scaling": dict[str, Any]},
    **{"rope_theta": float, "rms_norm_eps": float, "no_rope_layers": list[int]},
}


def need(package: str) -> ModuleType:
    """The package; raises ConfigError if it is not installed."""
    with as_config_error(f"language models need {package}: {pip_install('lm')} (%s)"):
        return importlib.import_module(package)


@contextlib.contextmanager
def as_config_error(message: str) -> Iterator[None]:
    """Makes a ConfigError, with the error at the last %s, of any: `tokenizers` raises some that are no Exceptions."""
    try:
        yield
    except (ConfigError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        before, _, after = message.rpartition("%s")
        raise ConfigError(f"{before}{error}{after}") from error


def file_in(folder: str | Path, name: str) -> Path:
    """The path of a file in a model folder, which need not exist; ConfigError for what is not a file.

    A downloaded folder may come from anyone, so links may lead only to files in the folder, or, in the cache of Hugging
    Face, to the blobs beside its snapshots.
    """
    folder = as_path(folder)
    path = folder / name
    with as_config_error(f"{path} cannot be read: %s"):  # a loop of links, or not a name
        inside, found = folder.resolve(), path.resolve()
        allowed = [inside, *([inside.parents[1] / "blobs"] if inside.parent.name == "snapshots" else [])]
        is_inside = any(found.is_relative_to(each) for each in allowed)
        is_other = found.exists() and not found.is_file()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()  # of a loop of links, which `resolve` takes from Python 3.13 on
    if not is_inside:
        raise ConfigError(f"{path} leads out of the model's folder, to {found}; copy the file into the folder")
    if is_other:
        raise ConfigError(f"{path} is not a file; copy the model's folder again")
    return path


def read_fields(folder: str | Path, name: str, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON object in a file of a model folder, {} without it; its fields are null or of the types in `kinds`."""
    path = file_in(folder, name)
    fields = read_json(path) if path.exists() else {}
    for field, kind in kinds.items():
        if not fits(value := fields.get(field), kind | None):
            raise ConfigError(f"{path}: {field}={value!r:.200} must be {describe_kind(kind)}; copy the file again")
    return fields


def read_config(folder: str | Path) -> dict[str, Any]:
    """The contents of config.json; ConfigError if it is missing or damaged, or a field has another type."""
    path, folder = file_in(folder, CONFIG), as_path(folder)
    if path.exists():
        return read_fields(folder, CONFIG, _KINDS)
    advice = f"name the folder of a model, with its {CONFIG} and safetensors"
    found = f"there is no folder {folder}, and nothing is downloaded"
    if folder.is_dir():
        found = f"{folder} has {', '.join(sorted(each.name for each in folder.iterdir())) or 'no files':.200}"
    elif folder.exists():
        found = f"{folder} is a file"
    elif len(folder.parts) == 2 and not folder.is_absolute():
        advice += f"; one of Hugging Face's hub: `hf download {folder} --local-dir {folder.name}`"
    if ".gguf" in found:
        advice += "; GGUF is not read, but transformers makes a folder of it: from_pretrained(..., gguf_file=...)"
    raise ConfigError(f"{path} cannot be read: {found}; {advice}")


def find_model(folder: str | Path) -> tuple[Path, Path | None]:
    """The folder of a whole model, and that of an adapter (LoRA) of its weights, None without one.

    The folder is that of a model, of an adapter in the format of PEFT, whose adapter_config.json names the folder of
    its model, or of a run of `grpo-jax lm`, which holds one of these. ConfigError for none or more than one.
    """
    folder = as_path(folder)
    is_whole, is_adapter = (file_in(folder, name).exists() for name in (CONFIG, ADAPTER))
    if is_adapter and not is_whole:
        named = read_fields(folder, ADAPTER, {_BASE: str}).get(_BASE) or "without a name"
        if not file_in(named, CONFIG).exists():
            missing = f"{folder} is an adapter of the model {named}, which is not here, and nothing is downloaded"
            raise ConfigError(f"{missing}; name the folder with that model's {CONFIG} as {_BASE} in its {ADAPTER}")
        return as_path(named), folder
    models = sorted({path.parent for name in (CONFIG, ADAPTER) for path in folder.glob(f"*/{name}")})
    if models and not is_whole:
        if len(models) > 1:
            raise ConfigError(f"{folder} has {len(models)} models; name one: {', '.join(map(str, models)):.500}")
        return find_model(file_in(folder, f"{models[0].relative_to(folder)}/{CONFIG}").parent)
    read_config(folder)
    return folder, None


def load_architecture(folder: str | Path, **changes: Any) -> Transformer:
    """The sizes of a checkpoint's transformer: `Config(network=load_architecture(folder))`.

    Args:
      folder: contains config.json; ConfigError if it has a feature that this transformer lacks, or is damaged.
      changes: fields of the `Transformer` to replace, such as `compute_dtype="bfloat16"`.
    """
    folder = find_model(folder)[0]
    return as_architecture(folder / CONFIG, read_config(folder), **changes)[0]


def as_architecture(path: Path, published: Mapping[str, Any], **changes: Any) -> tuple[Transformer, int]:
    """The transformer and the context that fields of config.json describe, which come from this path."""
    model_type = published.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ConfigError(f"{path}: model_type={model_type!r} is not supported; use one of {', '.join(MODEL_TYPES)}")
    rope = published.get("rope_scaling") or published.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in [*_ROPE_TYPES] or rope.get("partial_rotary_factor", 1.0) != 1:
        supported = f"only the types {', '.join(_ROPE_TYPES)}, of whole heads"
        raise ConfigError(f"{path}: rotary positions {rope} are not supported, {supported}; use another checkpoint")
    missing = [field for field in _REQUIRED if published.get(field) is None]
    if missing := [*missing, *(f"{name} ({kind} rope)" for name in _ROPE_TYPES[kind] if rope.get(name) is None)]:
        raise ConfigError(f"{path} lacks {', '.join(missing)}; copy the file of the published model again")
    for field in (*_REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings"):
        if published.get(field) is not None:
            as_count(f"{path}: {field}", published[field])
    for field, supported in _SUPPORTED.items():
        if published.get(field, supported) != supported:
            raise ConfigError(f"{path}: {field}={published[field]!r} is not supported, only {supported!r}")
    if other := set(published.get("layer_types") or []) - {"full_attention"}:
        raise ConfigError(f"{path}: layer_types has {sorted(other)[0]!r}, and only 'full_attention' is supported")
    interval = MODEL_TYPES[model_type].get("no_rope_interval", UNLIMITED)
    layers = published.get("no_rope_layers") or ()
    if any((number % interval > 0) != has_rope for number, has_rope in enumerate(layers, start=1)):
        raise ConfigError(f"{path}: no_rope_layers={layers} is not supported, only 0 at each 4th layer of smollm3")
    given = {"rope_theta": rope.get("rope_theta"), "tie_word_embeddings": model_type in _TIED}
    given |= {name: value for name, value in published.items() if value is not None}
    fields = {field: given[name] for name, field in _FIELDS.items() if given.get(name) is not None}
    fields["rope_scaling"] = tuple(map(rope.get, _ROPE_TYPES[kind])) or None
    try:
        architecture = Transformer(**fields | MODEL_TYPES[model_type] | changes)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return architecture, given.get("max_position_embeddings", UNLIMITED)


def describe_architecture(architecture: Transformer, *, vocab_size: int, context: int) -> dict[str, Any]:
    """The fields of config.json for this architecture; ConfigError if no published model type has its variants."""
    variants = {name: getattr(architecture, name) for fields in MODEL_TYPES.values() for name in fields}
    defaults = {name: getattr(Transformer, name) for name in variants}
    types = [name for name, fields in MODEL_TYPES.items() if defaults | fields == variants]
    if not types:
        raise ConfigError(f"no published model type has {variants}; use one of {MODEL_TYPES}")
    size, kind, scaling = architecture.sizes, types[0], architecture.rope_scaling
    rope, names = next(item for item in _ROPE_TYPES.items() if len(item[1]) == len(scaling or ()))
    scaled = {"rope_type": rope, **dict(zip(names, scaling or (), strict=True))}
    return {
        **{"model_type": kind, "architectures": [_CLASSES.get(kind, f"{kind.capitalize()}ForCausalLM")]},
        **{name: getattr(architecture, field) for name, field in _FIELDS.items()},
        **{"num_attention_heads": size.heads, "num_key_value_heads": size.kv_heads, "head_dim": size.head},
        **{"intermediate_size": size.feedforward, "max_position_embeddings": context, "vocab_size": vocab_size},
        **{"hidden_act": "silu", "rope_scaling": scaling and scaled},
        **({"no_rope_layers": None} if architecture.no_rope_interval else {}),  # by the interval
    }

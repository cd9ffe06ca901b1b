"""Published language models from disk: a folder with config.json and safetensors in the layout of Llama and Qwen.

    fields = config_fields("Qwen3-0.6B")
    config = Config(environment=my_task, **fields, compute_dtype="bfloat16")  # its actions: the model's vocabulary
    state = make_init(config)(key, hyperparams)
    state = state.replace(params=state.params | load_params("Qwen3-0.6B"))

or, for completions alone, `generate` with the policy that `grpo_jax.policies.make_token_policy` makes. Reading weights
and tokenizers needs the extra `pretrained`.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from grpo_jax.errors import ConfigError
from grpo_jax.types import PyTree

# What differs between them beyond sizes.
MODEL_TYPES = {
    "llama": {},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True},
}

# Fields of config.json that may say no more than this (or be missing), as nothing here does what else they can say.
_ONLY = {
    "hidden_act": ("silu",),
    "use_sliding_window": (False,),
    "quantization_config": (None,),
    "partial_rotary_factor": (1.0,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
}


def config_fields(folder: str | Path) -> dict[str, Any]:
    """The fields of a `Config`, or but for `network` of an `Architecture`, that make the transformer of a checkpoint.

    Args:
      folder: with config.json.

    Raises:
      ConfigError: for a model that this transformer is not.
    """
    path = Path(folder) / "config.json"
    published = json.loads(path.read_text(encoding="utf-8"))
    model_type = published.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ConfigError(f"{path}: model_type={model_type!r} is not supported; use one of {', '.join(MODEL_TYPES)}")
    for field, supported in _ONLY.items():
        if field in published and published[field] not in supported:
            raise ConfigError(f"{path}: {field}={published[field]!r} is not supported, only {supported[0]!r}")
    rope = published.get("rope_parameters") or published.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ConfigError(f"{path}: scaled rotary positions are not supported: {rope}; use a checkpoint without")
    num_heads = published["num_attention_heads"]
    return {
        "network": "transformer",
        "num_layers": published["num_hidden_layers"],
        "width": published["hidden_size"],
        "num_heads": num_heads,
        "num_kv_heads": published.get("num_key_value_heads") or num_heads,
        "head_size": published.get("head_dim") or published["hidden_size"] // num_heads,
        "feedforward_size": published["intermediate_size"],
        "rope_base": float(published.get("rope_theta") or rope.get("rope_theta", 10_000.0)),
        "norm_eps": float(published.get("rms_norm_eps", 1e-6)),
        "tie_embeddings": bool(published.get("tie_word_embeddings", False)),
        **MODEL_TYPES[model_type],
    }


def load_params(folder: str | Path) -> PyTree:
    """The weights of a checkpoint as the parameters `{"actor": ...}` of the policy that `config_fields` makes.

    Args:
      folder: with config.json, and model.safetensors or model.safetensors.index.json and the files it names.

    Returns:
      float32 arrays, whatever the checkpoint has.

    Raises:
      ConfigError: if a weight is missing.
    """
    fields, tensor = config_fields(folder), _reader(Path(folder))

    def kernel(*names: str) -> dict:
        """Projections side by side; published as `[outputs, inputs]`."""
        made = {"kernel": jnp.concatenate([tensor(f"{name}.weight").T for name in names], axis=1)}
        if fields.get("attention_bias") and names[0].endswith("q_proj"):
            made["bias"] = jnp.concatenate([tensor(f"{name}.bias") for name in names])
        return made

    def scale(name: str) -> dict:
        return {"scale": tensor(f"{name}.weight")}

    params = {"embedding": tensor("model.embed_tokens.weight"), "norm": scale("model.norm")}
    if not fields["tie_embeddings"]:
        params["logits"] = kernel("lm_head")
    for number in range(fields["num_layers"]):
        layer = f"model.layers.{number}"
        attention, feedforward = f"{layer}.self_attn", f"{layer}.mlp"
        block = {
            "norm_1": scale(f"{layer}.input_layernorm"),
            "qkv": kernel(*(f"{attention}.{part}_proj" for part in "qkv")),
            "out": kernel(f"{attention}.o_proj"),
            "norm_2": scale(f"{layer}.post_attention_layernorm"),
            "gate_up": kernel(f"{feedforward}.gate_proj", f"{feedforward}.up_proj"),
            "down": kernel(f"{feedforward}.down_proj"),
        }
        if fields.get("qk_norm"):
            block |= {"query_norm": scale(f"{attention}.q_norm"), "key_norm": scale(f"{attention}.k_norm")}
        params[f"block_{number}"] = block
    return {"actor": params}


def _reader(folder: Path) -> Callable[[str], jnp.ndarray]:
    """`(name) -> float32 tensor` of a checkpoint in one file or in several."""
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ConfigError(f"loading weights needs safetensors: pip install 'grpo-jax[pretrained]' ({error})") from error

    index = folder / "model.safetensors.index.json"
    names = [folder / "model.safetensors"]
    if index.exists():
        names = [folder / file for file in set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())]
    # Mapped into memory: a tensor is read when it is asked for.
    files = [safe_open(file, framework="flax") for file in names]
    where = {name: file for file in files for name in file.keys()}

    def tensor(name):
        if name not in where:
            raise ConfigError(f"the checkpoint {str(folder)!r} lacks {name!r}, which its config.json promises")
        return jnp.asarray(where[name].get_tensor(name), jnp.float32)

    return tensor


def load_tokenizer(folder: str | Path) -> Any:
    """The `tokenizers.Tokenizer` of a checkpoint: `encode(text).ids`, `decode(ids)`."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(f"tokenizers is missing: pip install 'grpo-jax[pretrained]' ({error})") from error
    return Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))


def encode_prompts(tokenizer: Any, texts: Sequence[str]) -> np.ndarray:
    """The tokens of texts, as `generate` takes prompts: int32 `[N, P]`, -1 on the left of the shorter ones."""
    tokens = [tokenizer.encode(text).ids for text in texts]
    longest = max(map(len, tokens))
    return np.array([[-1] * (longest - len(ids)) + ids for ids in tokens], np.int32)

"""Loads published language models: folders with config.json and safetensors in the layout of Llama and Qwen.

    architecture = load_architecture("Qwen3-0.6B")
    config = Config(environment=my_task, transformer=architecture)  # my_task's actions: the whole vocabulary
    state = make_init(config)(key, hyperparams)
    state = state.replace(params=state.params | load_params("Qwen3-0.6B"))

For completions alone, pass the weights and a policy of `make_token_policy` to `generate`. Loading weights and
tokenizers needs the extra `pretrained`.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from grpo_jax.errors import ConfigError
from grpo_jax.policies.transformer import Architecture
from grpo_jax.types import PyTree

# Fields of `Architecture` beyond the sizes, for each supported `model_type`.
MODEL_TYPES = {
    "llama": {},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True},
}

# Fields of config.json with one supported value, which they may also leave out.
_SUPPORTED = {
    "hidden_act": "silu",
    "use_sliding_window": False,
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
    "attention_bias": False,
    "mlp_bias": False,
}


def load_architecture(folder: str | Path, **changes: Any) -> Architecture:
    """The sizes of a checkpoint's transformer: `Config(network="transformer", transformer=load_architecture(folder))`.

    Args:
      folder: contains config.json.
      changes: fields of the `Architecture` to replace, such as `compute_dtype="bfloat16"`.

    Raises:
      ConfigError: if the model has a feature that this transformer lacks.
    """
    path = Path(folder) / "config.json"
    published = json.loads(path.read_text(encoding="utf-8"))
    model_type = published.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ConfigError(f"{path}: model_type={model_type!r} is not supported; use one of {', '.join(MODEL_TYPES)}")
    for field, supported in _SUPPORTED.items():
        if published.get(field, supported) != supported:
            raise ConfigError(f"{path}: {field}={published[field]!r} is not supported, only {supported!r}")
    rope = published.get("rope_parameters") or published.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ConfigError(f"{path}: scaled rotary positions are not supported: {rope}; use a checkpoint without")
    num_heads = published["num_attention_heads"]
    fields = {
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
    return Architecture(**fields | changes)


def load_params(folder: str | Path) -> PyTree:
    """The weights of a checkpoint as parameters `{"actor": ...}` of a policy of that `load_architecture`.

    Args:
      folder: contains config.json and either model.safetensors or model.safetensors.index.json with the files it lists.

    Returns:
      float32 arrays, whatever the dtype of the checkpoint.

    Raises:
      ConfigError: if a weight or the package `safetensors` is missing.
    """
    architecture, tensor = load_architecture(folder), _reader(Path(folder))

    def kernel(*names: str) -> dict:
        """A dense layer of several published projections, concatenated along the outputs."""
        # Published weights are [outputs, inputs].
        layer = {"kernel": jnp.concatenate([tensor(f"{name}.weight").T for name in names], axis=1)}
        if architecture.attention_bias and names[0].endswith("q_proj"):
            layer["bias"] = jnp.concatenate([tensor(f"{name}.bias") for name in names])
        return layer

    def scale(name: str) -> dict:
        return {"scale": tensor(f"{name}.weight")}

    params = {"embedding": tensor("model.embed_tokens.weight"), "norm": scale("model.norm")}
    if not architecture.tie_embeddings:
        params["logits"] = kernel("lm_head")
    for number in range(architecture.num_layers):
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
        if architecture.qk_norm:
            block |= {"query_norm": scale(f"{attention}.q_norm"), "key_norm": scale(f"{attention}.k_norm")}
        params[f"block_{number}"] = block
    return {"actor": params}


def _reader(folder: Path) -> Callable[[str], jnp.ndarray]:
    """The function `(name) -> float32 tensor` of a checkpoint in one or several files."""
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ConfigError(f"loading weights needs safetensors: pip install 'grpo-jax[pretrained]' ({error})") from error

    index = folder / "model.safetensors.index.json"
    names = [folder / "model.safetensors"]
    if index.exists():
        names = [folder / file for file in set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())]
    # Memory-mapped: a tensor is read only when it is requested.
    files = [safe_open(file, framework="flax") for file in names]
    where = {name: file for file in files for name in file.keys()}

    def tensor(name):
        if name not in where:
            raise ConfigError(f"the checkpoint {str(folder)!r} lacks {name!r}, which its config.json implies")
        return jnp.asarray(where[name].get_tensor(name), jnp.float32)

    return tensor


def load_tokenizer(folder: str | Path) -> Any:
    """The `tokenizers.Tokenizer` of a checkpoint: `encode(text).ids`, `decode(ids)`."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(f"tokenizers need a package: pip install 'grpo-jax[pretrained]' ({error})") from error
    return Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))


def encode_prompts(tokenizer: Any, texts: Sequence[str]) -> np.ndarray:
    """The tokens of texts as prompts for `generate`: int32 `[N, P]`, shorter texts padded with -1 on the left."""
    tokens = [tokenizer.encode(text).ids for text in texts]
    longest = max(map(len, tokens))
    return np.array([[-1] * (longest - len(ids)) + ids for ids in tokens], np.int32)

"""The weights of a model folder as parameters of a policy, and back."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from safetensors import safe_open

from grpo_jax.errors import ConfigError, as_count
from grpo_jax.language.folder import (
    ADAPTER,
    as_config_error,
    file_in,
    find_model,
    load_architecture,
    read_config,
    read_fields,
)
from grpo_jax.policies import Transformer, categorical, make_token_policy, merge_lora
from grpo_jax.types import PyTree, by_path

WEIGHTS, ADAPTER_WEIGHTS = "model.safetensors", "adapter_model.safetensors"
# Fields of adapter_config.json with one supported value, which they may also leave out.
_SUPPORTED_ADAPTER = {"peft_type": "LORA", "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}}
_FLOATS = "float16", "bfloat16", "float32", "float64"


def published_names(architecture: Transformer) -> dict[str, tuple[str, ...]]:
    """The published tensors that make up each parameter side by side along its last axis, by its path.

    A kernel, `[inputs, outputs]`, is the transpose of the published tensor.
    """
    names = {"embedding": ("model.embed_tokens.weight",), "norm/scale": ("model.norm.weight",)}
    if not architecture.tie_embeddings:
        names["logits/kernel"] = ("lm_head.weight",)
    for number in range(architecture.num_layers):
        ours, layer = f"block_{number}", f"model.layers.{number}"
        attention, feedforward = f"{layer}.self_attn", f"{layer}.mlp"
        names |= {
            f"{ours}/norm_1/scale": (f"{layer}.input_layernorm.weight",),
            f"{ours}/qkv/kernel": tuple(f"{attention}.{part}_proj.weight" for part in "qkv"),
            f"{ours}/out/kernel": (f"{attention}.o_proj.weight",),
            f"{ours}/norm_2/scale": (f"{layer}.post_attention_layernorm.weight",),
            f"{ours}/gate_up/kernel": (f"{feedforward}.gate_proj.weight", f"{feedforward}.up_proj.weight"),
            f"{ours}/down/kernel": (f"{feedforward}.down_proj.weight",),
        }
        if architecture.attention_bias:
            names[f"{ours}/qkv/bias"] = tuple(f"{attention}.{part}_proj.bias" for part in "qkv")
        if architecture.qk_norm:
            names[f"{ours}/query_norm/scale"] = (f"{attention}.q_norm.weight",)
            names[f"{ours}/key_norm/scale"] = (f"{attention}.k_norm.weight",)
    return names


def load_params(folder: str | Path) -> PyTree:
    """The weights of a checkpoint, in float32, as parameters `{"actor": ...}` of a policy with its `load_architecture`.

    Args:
      folder: contains config.json and either model.safetensors or model.safetensors.index.json with the files it lists;
        or that of an adapter (LoRA), which is added to the weights of its model, or of a run with either.

    Raises:
      ConfigError: a file or a weight is missing, damaged or of another size, or the folder is a scorer's.
    """
    folder, adapter = find_model(folder)
    kinds = read_config(folder).get("architectures") or ()
    if any(kind.endswith("ForSequenceClassification") for kind in kinds):
        raise ConfigError(f"{folder} is no language model but a scorer, {', '.join(kinds)}; name another folder")
    architecture, tensor = load_architecture(folder), functools.partial(_tensor, folder, _files(folder))
    if adapter is not None:
        tensor = _with_adapter(adapter, architecture, tensor)
    return read_params(folder, architecture, tensor)


def read_params(source: Path, architecture: Transformer, tensor: Callable[[str], Any]) -> PyTree:
    """The parameters `{"actor": ...}` of a network, made of what `tensor(published name)` gives from a source."""
    params = {}
    tensor(f"model.layers.{architecture.num_layers - 1}.input_layernorm.weight")  # before a name for each layer is made
    for path, names in published_names(architecture).items():
        parts = [_finite(tensor(name), name, source) for name in names]
        parts = [part.T for part in parts] if path.endswith("kernel") else parts
        fit = len({part.shape[:-1] for part in parts}) == 1
        params[path] = jnp.concatenate(parts, axis=-1) if fit and len(parts) > 1 else parts[0]
    params = unflatten_dict(params, sep="/")
    _check_shapes(source, architecture, params)
    return {"actor": params}


def _check_shapes(source: Path | str, architecture: Transformer, params: PyTree) -> None:
    """Raises ConfigError for weights of other sizes than the architecture's."""
    tokens = categorical(architecture.vocab_size or len(params["embedding"]))
    small = dataclasses.replace(architecture, num_layers=1, shared_critic=False)  # all layers have the same sizes
    policy = make_token_policy(small, tokens, max_steps=1)
    of_first, arrays = by_path(jax.eval_shape(policy.init, jax.random.key(0))["actor"]), by_path(params)
    for path, names in published_names(architecture).items():
        expected = of_first[re.sub(r"block_\d+", "block_0", path)].shape
        if (shape := jnp.shape(arrays[path])) != expected:
            shapes = f"{shape} instead of {expected}"
            raise ConfigError(f"{source}: {' and '.join(names)} of another size than config.json implies: {shapes}")


def published_weights(architecture: Transformer, params: PyTree, dtype: str = "float32") -> dict[str, jax.Array]:
    """The tensors of a checkpoint by their names: the inverse of `load_params`. Adapters (LoRA) are added to them.

    Args:
      architecture: of the params, which else are a ConfigError.
      params: `{"actor": ...}` or `{"actor_critic": ...}`; the parameters of a critic are left out.
      dtype: of the tensors, float32 or bfloat16.
    """
    plain, merged = merge_lora(architecture, {"actor": actor_params(params)})
    arrays, tensors, published = by_path(merged["actor"]), {}, published_names(architecture)
    known = {path for path in arrays if not path.startswith("value/")}
    if different := sorted(known ^ published.keys()):
        different = ", ".join(different)
        raise ConfigError(f"{different}: in the params or in the architecture, but not in both; use config.network")
    if arrays["norm/scale"].ndim > 1:
        raise ConfigError("the params have an axis of rows; choose one: jax.tree.map(lambda leaf: leaf[0], params)")
    _check_shapes("the params", plain, merged["actor"])
    for path, names in published.items():
        parts = split_outputs(architecture, path, jnp.asarray(arrays[path], dtype))
        for name, part in zip(names, parts, strict=True):
            tensors[name] = part.T if path.endswith("kernel") else part
    return tensors


def adapter_weights(architecture: Transformer, params: PyTree, dtype: str) -> dict[str, jax.Array]:
    """The tensors of adapters by their names in PEFT. Layers that ours joins, such as q, k and v, share its lora_a."""
    arrays, tensors = by_path(actor_params(params)), {}
    for path, names in published_names(architecture).items():
        layer = path.rpartition("/")[0]
        if not path.endswith("/kernel") or f"{layer}/lora_a" not in arrays:
            continue
        lora_a, lora_b = (jnp.asarray(arrays[f"{layer}/{name}"], dtype) for name in ("lora_a", "lora_b"))
        for name, part in zip(names, split_outputs(architecture, path, lora_b), strict=True):
            tensors |= zip(_factor_names(name), (lora_a.T, part.T), strict=True)
    return tensors


def _factor_names(name: str) -> list[str]:
    """The names in PEFT of lora_A `[r, inputs]` and lora_B `[outputs, r]` of the published tensor of this name."""
    return [f"base_model.model.{name.removesuffix('.weight')}.lora_{factor}.weight" for factor in "AB"]


def actor_params(params: PyTree) -> PyTree:
    """The parameters of the network that chooses tokens, among a policy's."""
    return next(network for name, network in params.items() if "actor" in name)


def split_outputs(architecture: Transformer, path: str, array: jax.Array) -> list[jax.Array]:
    """The parts, along the outputs, for each of the published tensors that make up the parameter of this path."""
    size = architecture.sizes
    if "/qkv/" in path:
        return jnp.split(array, np.cumsum([size.heads, size.kv_heads]) * size.head, axis=-1)
    return jnp.split(array, 2, axis=-1) if "/gate_up/" in path else [array]


def _files(folder: Path, weights: str = WEIGHTS) -> dict[str, Any]:
    """The open file of each tensor of a checkpoint in one or several files, by its name."""
    index, names = f"{weights}.index.json", [weights]
    if file_in(folder, index).exists():
        weight_map = read_fields(folder, index, {"weight_map": dict[str, str]}).get("weight_map") or {}
        names = sorted(set(weight_map.values()))
    files = []
    for name in names:
        with as_config_error(f"{folder / name} cannot be read: %s; a model folder has {weights} or {index}"):
            # Memory-mapped: a tensor is read only when it is requested.
            files.append(safe_open(file_in(folder, name), framework="flax"))
    return {name: file for file in files for name in file.keys()}


def _tensor(folder: Path, files: Mapping[str, Any], name: str) -> jax.Array:
    if name not in files:
        raise ConfigError(f"{folder} lacks {name!r}, which its config.json implies")
    with as_config_error(f"{folder}: {name!r} cannot be read: %s"):  # for a dtype that `safetensors` does not know
        found = files[name].get_tensor(name)
    if found.dtype.name not in _FLOATS:
        raise ConfigError(f"{folder}: {name!r} is {found.dtype}; use one of {_FLOATS}")
    return jnp.asarray(found, jnp.float32)


def _with_adapter(folder: Path, architecture: Transformer, tensor: Callable[[str], Any]) -> Callable[[str], jax.Array]:
    """The function `(name) -> tensor` of a model with an adapter in the format of PEFT: W + lora_alpha / r · B A."""
    path, files = folder / ADAPTER, _files(folder, ADAPTER_WEIGHTS)
    fields = read_fields(folder, ADAPTER, {"r": int, "lora_alpha": float})
    for field, value in _SUPPORTED_ADAPTER.items():
        if fields.get(field) not in (None, value):
            raise ConfigError(f"{path}: {field}={fields[field]!r} is not supported, only {value!r}")
    rank = as_count(f"{path}: r", fields.get("r"))
    scale = dataclasses.replace(architecture, lora_rank=rank, lora_alpha=fields.get("lora_alpha")).adapter.scale
    pairs = {name: _factor_names(name) for names in published_names(architecture).values() for name in names}
    if other := sorted(files.keys() - {part for pair in pairs.values() for part in pair}):
        advice = "name the adapter's own base model, or merge it by peft"
        raise ConfigError(f"{folder} has {other[0]!r}, which is no LoRA of a layer of this base model; {advice}")

    def merged(name):
        if files.keys().isdisjoint(pairs[name]):
            return tensor(name)
        a, b = (_tensor(folder, files, part) for part in pairs[name])
        with as_config_error(f"{folder}: {pairs[name][0]} is of another model: %s"):
            return jax.lax.add(tensor(name), scale * jnp.matmul(b, a, precision="highest"))

    return merged


def _finite(array: Any, name: str, source: Path) -> jax.Array:
    """The array; ConfigError if an element is NaN or infinite."""
    if not np.isfinite(array).all():
        raise ConfigError(f"{source}: {name} has weights that are not finite; use an earlier checkpoint")
    return jnp.asarray(array)

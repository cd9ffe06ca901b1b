"""LoRA (https://arxiv.org/abs/2106.09685): dense layers with small trained adapters beside their frozen kernels.

    y = x kernel + lora_alpha / lora_rank · x lora_a lora_b

with lora_a `[inputs, rank]` and lora_b `[rank, outputs]`. lora_b begins at 0, so at first the outputs equal the
model's without adapters. `lora_rank` of `Transformer` turns it on; `lora_alpha` and `frozen_dtype` are its options.
"""

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from grpo_jax.errors import ConfigError
from grpo_jax.policies.dense import adapter_init
from grpo_jax.policies.token_policy import is_trained
from grpo_jax.policies.transformer import DENSE_LAYERS, Transformer
from grpo_jax.types import PyTree

_MATRICES = ("lora_a", "lora_b")


def add_lora(architecture: Transformer, params: PyTree, key: jax.Array) -> PyTree:
    """The parameters of a model with fresh adapters, which do not change its outputs yet.

    Args:
      architecture: with `lora_rank`.
      params: of the policy without adapters, such as `{"actor": ...}` from `load_params`. Weights that LoRA freezes get
        `frozen_dtype`, except for the norms' scales.
      key: of the adapters.

    Raises:
      ConfigError: the architecture has no `lora_rank`, or the parameters have adapters already.
    """
    flat = flatten_dict(params)
    if architecture.adapter is None:
        raise ConfigError("add_lora needs an architecture with adapters; use dataclasses.replace(..., lora_rank=16)")
    if any(path[-1] == "lora_a" for path in flat):
        raise ConfigError("the parameters have adapters already; merge_lora adds them to the weights")
    for number, path in enumerate(sorted(flat)):
        *layer, name = path
        leaf = flat[path]
        if path[0] == "critic":
            continue
        if name in ("kernel", "bias", "embedding") and not is_trained("/".join(path)):
            flat[path] = leaf.astype(architecture.frozen_dtype)
        if name == "kernel" and layer[-1] in DENSE_LAYERS:
            (inputs, outputs), rank = leaf.shape, architecture.lora_rank
            flat[*layer, "lora_a"] = adapter_init(jax.random.fold_in(key, number), (inputs, rank), jnp.float32)
            flat[*layer, "lora_b"] = jnp.zeros((rank, outputs), jnp.float32)
    return unflatten_dict(flat)


def merge_lora(architecture: Transformer, params: PyTree) -> tuple[Transformer, PyTree]:
    """The same model without adapters, which are added to the kernels: its architecture and float32 parameters.

    Args:
      architecture: of the policy. Parameters without adapters keep their values.
      params: of the policy.

    Raises:
      ConfigError: the adapters have another rank than the architecture.
    """
    flat, adapter = flatten_dict(params), architecture.adapter
    ranks = {leaf.shape[-1] for path, leaf in flat.items() if path[-1] == "lora_a"}
    if ranks - {architecture.lora_rank}:
        raise ConfigError(
            f"the parameters have adapters of rank {', '.join(map(str, ranks))}, but the architecture has lora_rank="
            f"{architecture.lora_rank}; use the policy's, config.network, which also has their lora_alpha"
        )
    merged = {path: leaf.astype(jnp.float32) for path, leaf in flat.items() if path[-1] not in _MATRICES}
    for *layer, name in flat:
        if name == "lora_a":
            change = jnp.matmul(flat[*layer, "lora_a"], flat[*layer, "lora_b"], precision="highest")
            merged[*layer, "kernel"] += adapter.scale * change
    return architecture.without_lora, unflatten_dict(merged)

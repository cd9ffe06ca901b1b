"""Folders of adapters (LoRA) in the format of PEFT, which `peft` and transformers load on top of a model folder."""

from pathlib import Path

import jax
import jax.numpy as jnp

from grpo_jax.errors import ConfigError
from grpo_jax.language.models import LanguageModel, changed_fields
from grpo_jax.language.saving import copy_tokenizer, model_files
from grpo_jax.language.weights import actor_params, published_names, split_outputs
from grpo_jax.policies import Transformer
from grpo_jax.recording.files import write_arrays, write_json
from grpo_jax.types import PyTree, by_path

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"


def save_adapter(folder: str | Path, model: LanguageModel, params: PyTree, *, dtype: str = "float32") -> None:
    """Writes the adapters of a trained model, with its tokenizer; the frozen weights stay in the model's own folder.

    Args:
      folder: created if it does not exist. All its files are written, or none.
      model: the model that was trained, `model._replace(architecture=config.network)`, with `lora_rank`.
      params: of its policy, without an axis of rows.
      dtype: of the adapters, "float32" or "bfloat16".

    Raises:
      ConfigError: for another dtype, without adapters, or for a model that differs from its folder's.
    """
    if model.architecture.adapter is None:
        raise ConfigError("save_adapter needs adapters, and the architecture has no lora_rank; use save_trained")
    if changed_fields(model, len(actor_params(params)["embedding"])):
        raise ConfigError(
            f"adapters are added to the model in {model.folder}, but the trained one has another architecture or "
            "context than its config.json; use save_trained, which adds them to the weights"
        )
    arrays = adapter_weights(model.architecture, params, dtype)
    description = {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(model.folder.resolve())},
        **{"r": model.architecture.lora_rank, "lora_alpha": model.architecture.lora_alpha},
        **{"target_modules": sorted({name.split(".")[-3] for name in arrays})},
        **{"lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "inference_mode": True},
    }
    with model_files(folder, dtype) as new:
        copy_tokenizer(model.folder, new)
        write_json(new / ADAPTER_CONFIG, description)
        write_arrays(new / ADAPTER, arrays, {"format": "pt"})


def adapter_weights(architecture: Transformer, params: PyTree, dtype: str = "float32") -> dict[str, jax.Array]:
    """The tensors of adapters by their names in PEFT: lora_A `[rank, inputs]` and lora_B `[outputs, rank]`.

    The published layers that one of ours joins, such as q, k and v, share its lora_a, and have their columns of lora_b.
    """
    arrays, tensors = by_path(actor_params(params)), {}
    for path, names in published_names(architecture).items():
        layer = path.rpartition("/")[0]
        if not path.endswith("/kernel") or f"{layer}/lora_a" not in arrays:
            continue
        lora_a, lora_b = (jnp.asarray(arrays[f"{layer}/{name}"], dtype) for name in ("lora_a", "lora_b"))
        for name, part in zip(names, split_outputs(architecture, path, lora_b), strict=True):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = lora_a.T
            tensors[f"{module}.lora_B.weight"] = part.T
    return tensors

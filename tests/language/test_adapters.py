"""Folders of adapters in PEFT's format: what a LoRA run keeps, and what it needs to go on."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from language_models import MODEL_TYPES, make_model
from safetensors.numpy import load_file

from grpo_jax.errors import ConfigError
from grpo_jax.language import load_model, load_params, save_adapter, save_trained
from grpo_jax.policies import add_lora


def trained(folder, model_type, layers=("qkv", "out", "gate_up", "down")):
    """A model with adapters after training: no adapter is 0."""
    model = load_model(make_model(folder, model_type))
    architecture = dataclasses.replace(model.architecture, lora_rank=3, lora_alpha=5.0, lora_layers=layers)
    params = jax.jit(functools.partial(add_lora, architecture))(load_params(folder), jax.random.key(0))
    draws = np.random.default_rng(0)

    def change(path, leaf):
        return draws.normal(size=leaf.shape).astype(np.float32) if "lora_b" in str(path) else np.asarray(leaf)

    return model._replace(architecture=architecture), jax.tree_util.tree_map_with_path(change, params)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_each_published_layer_gets_its_part_of_our_adapters(tmp_path, model_type):
    model, params = trained(tmp_path / "base", model_type)
    save_adapter(tmp_path / "adapter", model, params)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    block, layer = params["actor"]["block_0"], "base_model.model.model.layers.0"
    joined = {"qkv": [f"self_attn.{part}_proj" for part in "qkv"], "out": ["self_attn.o_proj"]}
    joined |= {"gate_up": ["mlp.gate_proj", "mlp.up_proj"], "down": ["mlp.down_proj"]}
    for ours, names in joined.items():
        for name in names:
            np.testing.assert_array_equal(tensors.pop(f"{layer}.{name}.lora_A.weight"), block[ours]["lora_a"].T)
        parts = [tensors.pop(f"{layer}.{name}.lora_B.weight") for name in names]
        np.testing.assert_array_equal(np.concatenate(parts), block[ours]["lora_b"].T)
    assert not tensors
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"]) == (3, 5.0)
    assert described["base_model_name_or_path"] == str((tmp_path / "base").resolve())


def test_only_layers_with_adapters_are_targets_and_without_any_there_is_an_error(tmp_path):
    model, params = trained(tmp_path / "base", "llama", ("qkv",))
    save_adapter(tmp_path / "adapter", model, params, dtype="bfloat16")
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert described["target_modules"] == ["k_proj", "q_proj", "v_proj"]
    with pytest.raises(ConfigError, match="no lora_rank; use save_trained"):
        save_adapter(tmp_path / "other", load_model(tmp_path / "base"), params)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_peft_gives_the_logits_of_the_merged_model(tmp_path, model_type):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    model, params = trained(tmp_path / "base", model_type)
    save_adapter(tmp_path / "adapter", model, params)
    save_trained(tmp_path / "merged", model, params)
    tokens = torch.tensor([transformers.AutoTokenizer.from_pretrained(tmp_path / "adapter")("12 + 3 = 15").input_ids])
    published = transformers.AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        base, merged = (published(tmp_path / name)(tokens).logits.numpy() for name in ("base", "merged"))
        found = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")(tokens).logits.numpy()
    assert np.abs(found - base).max() > 1
    np.testing.assert_allclose(found, merged, atol=1e-3)

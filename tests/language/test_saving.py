"""Folders of trained models: no weight is lost, and a folder is written whole or not at all."""

import dataclasses
import errno
import json

import jax
import numpy as np
import pytest
from language_models import make_model, make_params, make_tokenizer

from grpo_jax.errors import ConfigError
from grpo_jax.language import load_model, load_params, save_adapter, save_model, save_trained, saving
from grpo_jax.policies import add_lora, merge_lora


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(make_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def trained(model):
    """An architecture with adapters, and parameters after training: no adapter is 0."""
    architecture = dataclasses.replace(model.architecture, lora_rank=3, lora_alpha=5.0, lora_layers=("qkv", "down"))
    params = jax.jit(lambda params: add_lora(architecture, params, jax.random.key(0)))(load_params(model.folder))
    return architecture, jax.tree_util.tree_map_with_path(
        lambda path, leaf: np.asarray(leaf) + np.float32(0.1 * ("lora_b" in str(path))), params
    )


def are_equal(a, b):
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


def save_anew(folder, architecture, params):
    save_model(folder, architecture, params, make_tokenizer(), end_token="<|im_end|>", context=64)


@pytest.mark.parametrize("name", ["actor", "actor_critic"])
def test_adapters_are_merged_when_a_model_is_saved(model, trained, tmp_path, name):
    architecture, params = trained
    _, merged = merge_lora(architecture, params)
    assert not are_equal(merged, load_params(model.folder))
    if name == "actor_critic":
        params = {name: params["actor"] | {"value": {"kernel": np.ones((16, 1)), "bias": np.zeros(1)}}}
    save_trained(tmp_path / "trained", model._replace(architecture=architecture), params)
    save_anew(tmp_path / "new", architecture, params)
    assert are_equal(load_params(tmp_path / "trained"), merged) and are_equal(load_params(tmp_path / "new"), merged)


CHANGES = {
    **{"rope_base": 100.0, "norm_eps": 0.5, "tie_embeddings": True, "num_kv_heads": 1, "head_size": 6, "num_layers": 2},
    **{"feedforward_size": 24, "qk_norm": False, "num_heads": 8, "vocab_size": 300},
}


@pytest.mark.parametrize("field", CHANGES)
def test_the_saved_model_is_the_one_that_was_trained(tmp_path, field):
    """Whatever `load_model` was told to change, also where transformers 5 keeps it."""
    folder = make_model(tmp_path / "first", "qwen3")
    config = json.loads((folder / "config.json").read_text())
    rope = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": rope, "note": 1}))
    model = load_model(folder, **{field: CHANGES[field]})._replace(context=32)
    params = make_params(model.architecture, model.vocab_size)
    save_trained(tmp_path / "second", model, params)
    again = load_model(tmp_path / "second")
    assert (again.architecture, again.context) == (model.architecture, 32)
    assert are_equal(load_params(tmp_path / "second"), params)
    saved = json.loads((tmp_path / "second" / "config.json").read_text())
    assert saved["rope_parameters"]["rope_theta"] == model.architecture.rope_base and saved["note"] == 1
    assert saved["architectures"] == ["LlamaForCausalLM" if field == "qk_norm" else "Qwen3ForCausalLM"]


def test_what_no_published_model_has_is_not_saved(model, trained, tmp_path):
    params, lora = load_params(model.folder), model._replace(architecture=trained[0])
    changed = model._replace(architecture=dataclasses.replace(model.architecture, attention_bias=True))
    with pytest.raises(ConfigError, match="no published model type has .*'attention_bias': True"):
        save_trained(tmp_path / "a", changed, params)
    for other in (lora._replace(context=32), lora._replace(architecture=dataclasses.replace(trained[0], norm_eps=0.5))):
        with pytest.raises(ConfigError, match="another architecture or context than its config.json; use save_trained"):
            save_adapter(tmp_path / "a", other, trained[1])
    with pytest.raises(ConfigError, match="save_model needs a tokenizers.Tokenizer; .* use save_trained"):
        save_model(tmp_path / "a", model.architecture, params, model.tokenizer, end_token="<|im_end|>", context=64)
    assert list(tmp_path.iterdir()) == []


def test_params_of_another_architecture_are_not_saved(model, trained, tmp_path):
    params = load_params(model.folder)["actor"]
    bias = {"block_0": params["block_0"] | {"out": params["block_0"]["out"] | {"bias": np.zeros(16)}}}
    cases = {
        "adapters of rank 3, but the architecture has lora_rank=None; use .*config.network": trained[1]["actor"],
        "^block_0/out/bias, block_1/norm: in the params or in": params | bias | {"block_1": {"norm": np.ones(16)}},
        "^norm/scale: in the params or in the architecture, but not in both": params | {"norm": {}},
        "the params have model.embed_tokens.weight of another size": params | {"embedding": np.zeros((258, 8))},
        "the params have an axis of rows; choose one": jax.tree.map(lambda leaf: leaf[None], params),
    }
    for message, actor in cases.items():
        for save in (
            lambda actor: save_trained(tmp_path / "a", model, actor),
            lambda actor: save_anew(tmp_path / "a", model.architecture, actor),
        ):
            with pytest.raises(ConfigError, match=message):
                save({"actor": actor})
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing_of_a_model(model, tmp_path, monkeypatch):
    def full(*arguments, **others):
        raise OSError(errno.ENOSPC, "No space left on device")

    params = load_params(model.folder)
    existing = make_model(tmp_path / "existing", "llama")
    before = {path.name: path.read_bytes() for path in existing.iterdir()}
    with monkeypatch.context() as patched:
        patched.setattr(saving, "write_arrays", full)  # the last of the files
        for folder in (tmp_path / "new", existing):
            for save in (
                lambda to: save_trained(to, model, params),
                lambda to: save_anew(to, model.architecture, params),
            ):
                with pytest.raises(OSError, match="No space left"):
                    save(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["existing"]
    assert {path.name: path.read_bytes() for path in existing.iterdir()} == before
    save_trained(existing, model, params)
    assert are_equal(load_params(existing), params)

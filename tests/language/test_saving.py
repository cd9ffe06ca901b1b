"""Folders of trained models and of adapters: no weight is lost, and a folder is written whole or not at all."""

import dataclasses
import errno
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from language_models import MODEL_TYPES, make_model, make_params, make_tokenizer, shard
from safetensors.numpy import load_file, save_file

from grpo_jax.errors import ConfigError
from grpo_jax.language import load_architecture, load_model, load_params, save_adapter, save_model, save_trained, saving
from grpo_jax.policies import add_lora, merge_lora


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(make_model(tmp_path_factory.mktemp("model")))


def train(folder, model_type):
    """A model with adapters after training: no adapter is 0."""
    model = load_model(make_model(folder, model_type))
    architecture = dataclasses.replace(model.architecture, lora_rank=3, lora_alpha=5.0)
    params = jax.jit(lambda params: add_lora(architecture, params, jax.random.key(0)))(load_params(folder))
    draws = np.random.default_rng(0)

    def change(path, leaf):
        return draws.normal(size=leaf.shape).astype(np.float32) if "lora_b" in str(path) else np.asarray(leaf)

    return model._replace(architecture=architecture), jax.tree_util.tree_map_with_path(change, params)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An architecture with adapters, and its parameters."""
    model, params = train(tmp_path_factory.mktemp("trained"), "qwen3")
    return model.architecture, params


def are_equal(a, b):
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


def save_anew(folder, architecture, params):
    save_model(folder, architecture, params, make_tokenizer(), end_token="<|im_end|>", context=64)


def test_adapters_are_merged_when_a_model_is_saved(model, trained, tmp_path):
    (architecture, params), (_, merged) = trained, merge_lora(*trained)
    assert not are_equal(merged, load_params(model.folder))
    critic = {"value": {"kernel": np.ones((16, 1)), "bias": np.zeros(1)}}
    for given in (params, {"actor_critic": params["actor"] | critic}):
        save_trained(tmp_path / "trained", model._replace(architecture=architecture), given)
        save_anew(tmp_path / "new", architecture, given)
        assert all(are_equal(load_params(tmp_path / name), merged) for name in ("trained", "new"))


CHANGES = {
    **{"rope_base": 100.0, "norm_eps": 0.5, "tie_embeddings": True, "num_kv_heads": 1, "head_size": 6, "num_layers": 2},
    **{"feedforward_size": 24, "qk_norm": False, "num_heads": 8, "vocab_size": 300, "rope_scaling": (4.0,)},
}


def test_the_saved_model_is_the_one_that_was_trained(tmp_path):
    """Whatever `load_model` was told to change, also from where transformers 5 keeps it."""
    folder = make_model(tmp_path / "first", "qwen3")
    config = json.loads((folder / "config.json").read_text())
    rope = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": rope, "note": 1}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    for field, value in CHANGES.items():
        model = load_model(folder, **{field: value})._replace(context=32)
        params = make_params(model.architecture, model.architecture.vocab_size)
        save_trained(tmp_path / field, model, params)
        again, saved = load_model(tmp_path / field), json.loads((tmp_path / field / "config.json").read_text())
        assert (again.architecture, again.context) == (model.architecture, 32)
        assert are_equal(load_params(tmp_path / field), params)
        assert again.tokenizer.end_tokens == (7, 9, 0)
        assert saved["rope_theta"] == model.architecture.rope_base and saved["note"] == 1
        assert saved["architectures"] == ["LlamaForCausalLM" if field == "qk_norm" else "Qwen3ForCausalLM"]


def test_what_cannot_be_saved_is_refused(model, trained, tmp_path):
    """Combinations that no published model has, and params of another architecture."""
    params, architecture = load_params(model.folder)["actor"], model.architecture
    lora, anew = model._replace(architecture=trained[0]), {"context": 64, "end_token": "<|im_end|>"}
    biased = model._replace(architecture=dataclasses.replace(architecture, attention_bias=True))
    other = lora._replace(architecture=dataclasses.replace(trained[0], norm_eps=0.5))
    bias = {"block_0": params["block_0"] | {"out": params["block_0"]["out"] | {"bias": np.zeros(16)}}}
    wrong = {
        "adapters of rank 3, but the architecture has lora_rank=None; use .*config.network": trained[1]["actor"],
        "^block_0/out/bias, block_1/norm: in the params or in": params | bias | {"block_1": {"norm": np.ones(16)}},
        "^norm/scale: in the params or in the architecture, but not in both": params | {"norm": {}},
        "the params: model.embed_tokens.weight of another size": params | {"embedding": np.zeros((258, 8))},
        "the params have an axis of rows; choose one": jax.tree.map(lambda leaf: leaf[None], params),
    }
    differs, tokenizer = "another architecture or context, or an adapter; use save_tr", model.tokenizer.backend
    calls = [
        ("no published model type has .*'attention_bias': True", save_trained, biased, params),
        *((differs, save_adapter, each, trained[1]["actor"]) for each in (lora._replace(context=32), other)),
        ("no lora_rank; use save_trained", save_adapter, model, trained[1]["actor"]),
        *((message, save_trained, model, actor) for message, actor in wrong.items()),
        *((message, save_anew, architecture, actor) for message, actor in wrong.items()),
    ]
    for message, save, of, actor in calls:
        with pytest.raises(ConfigError, match=message):
            save(tmp_path / "a", of, {"actor": actor})
    for message, changes in (
        ("save_model needs a tokenizers.Tokenizer; .* use save_trained", {"tokenizer": model.tokenizer}),
        ("the tokenizer has no token '</s>'; add it", {"end_token": "</s>"}),
        ("dtype='float16'; use one of float32, bfloat16", {"dtype": "float16"}),
    ):
        with pytest.raises(ConfigError, match=message):
            save_model(tmp_path / "a", architecture, {"actor": params}, **{"tokenizer": tokenizer, **anew} | changes)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing_of_a_model(model, tmp_path, monkeypatch):
    def full(*arguments, **others):
        raise OSError(errno.ENOSPC, "No space left on device")

    params, existing = load_params(model.folder), make_model(tmp_path / "existing", "llama")
    before = {path.name: path.read_bytes() for path in existing.iterdir()}
    monkeypatch.setattr(saving, "write_arrays", full)  # the last of the files
    for folder in (tmp_path / "new", existing):
        for save, of in ((save_trained, model), (save_anew, model.architecture)):
            with pytest.raises(OSError, match="No space left"):
                save(folder, of, params)
    assert [path.name for path in tmp_path.iterdir()] == ["existing"]
    assert {path.name: path.read_bytes() for path in existing.iterdir()} == before


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_saved_folder_is_the_one_that_was_loaded(tmp_path, model_type, monkeypatch):
    folder, second = make_model(tmp_path / "first", model_type), tmp_path / "second"
    model, params = load_model(folder), load_params(folder)
    assert are_equal(params, make_params(model.architecture, 258))
    save_trained(second, model, params)
    assert load_architecture(second) == model.architecture and are_equal(load_params(second), params)
    assert {path.name for path in second.iterdir()} == {path.name for path in folder.iterdir()}
    save_trained(second, model, params, dtype="bfloat16")
    rounded = jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.bfloat16).astype(np.float32), params)
    assert are_equal(load_params(second), rounded)
    shard(monkeypatch)
    save_trained(folder, model, rounded)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    sizes = {name: sum(x.nbytes for x in load_file(folder / name).values()) for name in index["weight_map"].values()}
    assert {path.name for path in folder.glob("*.safetensors")} == sizes.keys() and len(sizes) > 1
    assert max(sizes.values()) <= 20_000 and sum(sizes.values()) == index["metadata"]["total_size"]
    assert are_equal(load_params(folder), rounded), "in place of a single file"
    monkeypatch.undo()
    save_trained(folder, model, params)
    assert [path.name for path in folder.glob("*.safetensors*")] == ["model.safetensors"]
    assert are_equal(load_params(folder), params), "in place of several files"


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_each_published_layer_gets_its_part_of_our_adapters(tmp_path, model_type):
    model, params = train(tmp_path / "base", model_type)
    save_adapter(tmp_path / "adapter", model, params)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    names = *(f"self_attn.{each}_proj" for each in "qkvo"), *(f"mlp.{each}_proj" for each in ("gate", "up", "down"))
    modules = [f"base_model.model.model.layers.0.{name}" for name in names]
    assert tensors.keys() == {f"{module}.lora_{factor}.weight" for module in modules for factor in "AB"}
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"]) == (3, 5.0)
    assert described["base_model_name_or_path"] == str((tmp_path / "base").resolve())
    assert described["target_modules"] == [f"{name}_proj" for name in ("down", "gate", "k", "o", "q", "up", "v")]
    loaded, merged = load_params(tmp_path / "adapter"), merge_lora(model.architecture, params)[1]
    jax.tree.map(lambda *both: np.testing.assert_allclose(*both, atol=1e-5), loaded, merged)


WRONG_ADAPTERS = [
    ("use_rslora=True is not supported, only False", {"use_rslora": True}, "layers.0", (3, 16)),
    ("o_proj.lora_A.weight is of another model: ", {}, "layers.0", (3, 5)),
    ("which is no LoRA of a layer of this base model", {}, "layers.1", (3, 16)),
]


def test_an_adapter_is_loaded_on_its_base_model_or_refused(tmp_path):
    """The adapter is found in the folder of a run."""
    (model, params), run = train(tmp_path / "base", "llama"), tmp_path / "run"
    save_adapter(run / "adapter", model, params)
    assert (load_model(run).folder, load_model(run).adapter) == (tmp_path / "base", run / "adapter")
    base, moved = tmp_path / "base", tmp_path / "moved"
    base.rename(moved)
    with pytest.raises(ConfigError, match="adapter of the model .*base, which is not here.*base_model_name_or_path in"):
        load_model(run)
    moved.rename(base)
    found = load_model(run)
    assert not are_equal(found.params(), load_params(base))
    with pytest.raises(ConfigError, match="began with .* an adapter; use save_trained"):
        save_adapter(tmp_path / "second", found._replace(architecture=model.architecture), params)
    config, weights = (run / "adapter" / name for name in ("adapter_config.json", "adapter_model.safetensors"))
    fields, tensors = json.loads(config.read_text()), load_file(weights)
    for message, changes, layer, shape in WRONG_ADAPTERS:
        config.write_text(json.dumps(fields | changes))
        name = f"base_model.model.model.{layer}.self_attn.o_proj.lora_A.weight"
        save_file(tensors | {name: np.ones(shape, np.float32)}, weights)
        with pytest.raises(ConfigError, match=message):
            load_params(run)

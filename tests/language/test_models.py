"""Checkpoints in the published layout of Llama, Qwen2 and Qwen3, against a NumPy implementation."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import copy_task

from grpo_jax import Config
from grpo_jax.errors import ConfigError
from grpo_jax.language import encode_prompts, load_architecture, load_params, load_tokenizer
from grpo_jax.policies import make_token_policy
from grpo_jax.policies.distributions import categorical

CONFIG = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 11,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
MODELS = {
    "llama": {"num_hidden_layers": 2},
    "qwen2": {"tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 4},
    "qwen3": {"head_dim": 6, "rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
}


def random_weights(config):
    """Random weights by their published names, `[outputs, inputs]`."""
    draw = np.random.default_rng(0).normal
    width, head = config["hidden_size"], config.get("head_dim", 4)
    sizes = {"q": 4 * head, "k": 2 * head, "v": 2 * head}
    weights = {
        "model.embed_tokens.weight": draw(size=(11, width)),
        "model.norm.weight": draw(1.0, 0.3, width),
    }
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = draw(size=(11, width)) / 2
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for part, size in sizes.items():
            weights[f"{layer}self_attn.{part}_proj.weight"] = draw(size=(size, width)) / 3
            if config["model_type"] == "qwen2":
                weights[f"{layer}self_attn.{part}_proj.bias"] = draw(size=size)
            if config["model_type"] == "qwen3" and part != "v":
                weights[f"{layer}self_attn.{part}_norm.weight"] = draw(1.0, 0.3, head)
        weights[f"{layer}self_attn.o_proj.weight"] = draw(size=(width, 4 * head)) / 3
        for part in ("gate", "up"):
            weights[f"{layer}mlp.{part}_proj.weight"] = draw(size=(24, width)) / 3
        weights[f"{layer}mlp.down_proj.weight"] = draw(size=(width, 24)) / 3
        for part in ("input", "post_attention"):
            weights[f"{layer}{part}_layernorm.weight"] = draw(1.0, 0.3, width)
    return weights


def reference(config, weights, tokens):
    """Logits `[S, 11]` of one text in float64, one token and one head at a time."""
    head = config.get("head_dim", 4)

    def norm(x, name):
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-5) * weights[f"{name}.weight"]

    def project(x, name):
        return weights[f"{name}.weight"] @ x + weights.get(f"{name}.bias", 0.0)

    def turn(x, position):
        turned = np.empty_like(x)
        for i in range(head // 2):
            angle = position / 5000.0 ** (2 * i / head)
            a, b = x[i], x[i + head // 2]
            turned[i] = a * np.cos(angle) - b * np.sin(angle)
            turned[i + head // 2] = a * np.sin(angle) + b * np.cos(angle)
        return turned

    stream = [weights["model.embed_tokens.weight"][token] for token in tokens]
    for i in range(config["num_hidden_layers"]):
        layer, attention, mlp = f"model.layers.{i}", f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        queries, keys, values = [], [], []
        for position, x in enumerate(stream):
            x = norm(x, f"{layer}.input_layernorm")
            q, k, v = (project(x, f"{attention}.{part}_proj").reshape(-1, head) for part in "qkv")
            if config["model_type"] == "qwen3":
                q, k = norm(q, f"{attention}.q_norm"), norm(k, f"{attention}.k_norm")
            queries.append([turn(row, position) for row in q])
            keys.append([turn(row, position) for row in k])
            values.append(v)
        for position, x in enumerate(stream):
            heads = []
            for h in range(4):
                scores = [queries[position][h] @ keys[t][h // 2] / np.sqrt(head) for t in range(position + 1)]
                share = np.exp(scores - np.max(scores))
                share /= share.sum()
                heads.append(sum(share[t] * values[t][h // 2] for t in range(position + 1)))
            x = x + project(np.concatenate(heads), f"{attention}.o_proj")
            y = norm(x, f"{layer}.post_attention_layernorm")
            gate, up = project(y, f"{mlp}.gate_proj"), project(y, f"{mlp}.up_proj")
            stream[position] = x + project(gate / (1 + np.exp(-gate)) * up, f"{mlp}.down_proj")
    last = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    return np.array([project(norm(x, "model.norm"), last) for x in stream])


def write(folder, model_type, *, shards=1):
    """Writes a checkpoint: one file in float32, or several in bfloat16."""
    save_file = pytest.importorskip("safetensors.flax").save_file
    config = CONFIG | {"model_type": model_type} | MODELS[model_type]
    dtype = jnp.float32 if shards == 1 else jnp.bfloat16
    weights = {name: jnp.asarray(value, dtype) for name, value in random_weights(config).items()}
    (folder / "config.json").write_text(json.dumps(config))
    rounded = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return config, rounded
    names = sorted(weights)
    files = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: weights[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return config, rounded


TOKENS = np.array([[3, 1, 4, 10, 5, 9], [2, 6, 0, 7, 7, 1]])


@pytest.mark.parametrize("model_type, shards", [("llama", 1), ("qwen2", 1), ("qwen3", 2)])
def test_logits_are_those_of_the_published_architecture(tmp_path, model_type, shards):
    config, weights = write(tmp_path, model_type, shards=shards)
    architecture, params = load_architecture(tmp_path), load_params(tmp_path)
    policy = make_token_policy(architecture, categorical(11), max_steps=4)
    drawn = jax.eval_shape(policy.init, jax.random.key(0))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), drawn
    )

    @jax.jit
    def read(params):
        carry = policy.initial_carry(params, 2, jnp.asarray(TOKENS[:, :2]))
        return policy.sequence(params, jnp.asarray(TOKENS[:, 2:].T), carry, None)[0]

    expected = np.stack([reference(config, weights, text)[2:] for text in TOKENS], axis=1)
    assert expected.std() > 0.5
    np.testing.assert_allclose(read(params), expected, atol=1e-4)


def test_a_config_takes_the_architecture(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "qwen2"} | MODELS["qwen2"]))
    architecture = load_architecture(tmp_path, compute_dtype="bfloat16")
    config = Config(environment=copy_task(), num_envs=4, num_minibatches=1, network=architecture)
    sizes = config.network
    assert config.is_transformer and sizes.tie_embeddings and sizes.attention_bias and sizes.compute_dtype == "bfloat16"
    assert (sizes.num_layers, sizes.width, sizes.rope_base, sizes.norm_eps) == (1, 16, 5000.0, 1e-5)


UNSUPPORTED = {
    "model_type": ("gemma3", "model_type='gemma3' is not supported; use one of llama, qwen2, qwen3"),
    "rope_scaling": ({"rope_type": "llama3", "factor": 8.0}, "scaled rotary positions .*llama3"),
    "rope_parameters": ({"rope_type": "yarn", "rope_theta": 1e6}, "scaled rotary positions .*yarn"),
    "hidden_act": ("gelu", "hidden_act='gelu' is not supported, only 'silu'"),
    "use_sliding_window": (True, "use_sliding_window=True"),
    "attention_bias": (True, "attention_bias=True"),
    "quantization_config": ({"bits": 4}, "quantization_config"),
}


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_a_feature_that_is_not_supported_is_named(tmp_path, field):
    value, message = UNSUPPORTED[field]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "llama", field: value}))
    with pytest.raises(ConfigError, match=message):
        load_architecture(tmp_path)


def test_a_missing_weight_is_named(tmp_path):
    write(tmp_path, "qwen3")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "qwen3", "num_hidden_layers": 2}))
    with pytest.raises(ConfigError, match=r"lacks 'model.layers.1.input_layernorm.weight'"):
        load_params(tmp_path)


def test_prompts_of_texts_are_padded_on_the_left(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"one": 0, "two": 1, "three": 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="three"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')
    tokenizer = load_tokenizer(tmp_path)
    prompts = encode_prompts(tokenizer, ["two one", "one", "three two one"])
    assert prompts.tolist() == [[-1, 1, 0], [-1, -1, 0], [2, 1, 0]] and prompts.dtype == np.int32
    assert tokenizer.decode(prompts[2]) == "three two one"

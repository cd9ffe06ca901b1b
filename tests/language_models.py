"""What the tests of language models share: tiny folders, written in a moment, and chats."""

import functools
import json

import numpy as np
import pytest

from grpo_jax.language import LanguageTask, Reward, as_prompts, save_model
from grpo_jax.language.weights import published_names
from grpo_jax.policies import Transformer

MODEL_TYPES = {
    **{"llama": {}, "qwen2": {"attention_bias": True, "tie_embeddings": True}, "qwen3": {"qk_norm": True}},
    "smollm3": {"no_rope_interval": 4, "tie_embeddings": True},
}

CHAT = [
    {"role": "system", "content": "Answer with a number."},
    {"role": "user", "content": "2 + 3 = ?"},
    {"role": "assistant", "content": "5 "},
    {"role": "user", "content": '4 + "4" = ?\n <b>é</b>'},
]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "default system message": (
        "{%- if messages[0]['role'] == 'system' %}\n    {{- 'S: ' + messages[0]['content'] | trim }}\n"
        "{%- else %}\n    {{- 'S: You are helpful.' }}\n{%- endif %}\n"
        "{%- for message in messages %}\n    {%- if message.role == 'system' %}{% continue %}{% endif %}\n"
        "    {{- '\\n' + message['role'] | upper + ': ' + message.content + eos_token }}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n    {{- '\\nASSISTANT:' }}\n{%- endif %}\n"
    ),
    "json, tools and namespaces": (
        "{%- set ns = namespace(count=0) -%}{{ bos_token }}{% if tools %}tools{% endif %}\n"
        "{% for message in messages %}\n  {% set ns.count = ns.count + 1 %}\n"
        "{{ ns.count }} {{ message | tojson }}\n{% if message.content is none %}none{% endif %}"
        "{% if message.role == 'assistant' %}"
        "{% generation %}{{ message.content }}{% endgeneration %}{% endif %}\n{% endfor %}"
        "{% if not add_generation_prompt %}{{ raise_exception('no') }}{% endif %}"
    ),
}


def make_tokenizer():
    """A byte-level BPE without merges: a token for each byte, and two for chats."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = ["<|im_end|>", "<|im_start|>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: number for number, token in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(alphabet[:2])
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def make_params(architecture, vocab_size):
    """Random weights, in the shapes of a policy, without compiling one."""
    size, width = architecture.sizes, architecture.width
    heads = size.heads + 2 * size.kv_heads
    shapes = {
        **{
            "embedding": (vocab_size, width),
            "logits/kernel": (width, vocab_size),
            "qkv/kernel": (width, heads * size.head),
        },
        **{"out/kernel": (size.heads * size.head, width), "gate_up/kernel": (width, 2 * size.feedforward)},
        **{"down/kernel": (size.feedforward, width), "qkv/bias": (heads * size.head,)},
        **{"query_norm/scale": (size.head,), "key_norm/scale": (size.head,)},
    }
    params = {}
    for number, path in enumerate(published_names(architecture)):
        *parents, leaf = path.split("/")
        shape = shapes.get("/".join([*parents, leaf][-2:]), (width,))
        node = params
        for parent in parents:
            node = node.setdefault(parent, {})
        draw = np.random.default_rng(number).normal(scale=0.3, size=shape).astype(np.float32)
        node[leaf] = 1 + draw if leaf == "scale" else draw
    return {"actor": params}


def make_model(folder, model_type="qwen3", *, chat_template=CHATML, context=64, **sizes):
    """Writes the folder of a model with 258 tokens, and returns it."""
    pytest.importorskip("jinja2")
    sizes = {
        "num_layers": 1,
        "width": 16,
        "num_heads": 4,
        "num_kv_heads": 2,
        "norm_eps": 1e-5,
        "rope_base": 5e3,
    } | sizes
    architecture = Transformer(**sizes, **MODEL_TYPES[model_type])
    end = {"end_token": "<|im_end|>", "context": context, "chat_template": chat_template}
    save_model(folder, architecture, make_params(architecture, 258), make_tokenizer(), **end)
    return folder


def lengths(completions, **fields):
    """A reward."""
    return [len(text) for text in completions]


def make_task(model, rows=({"prompt": "12", "answer": "a"}, {"prompt": "345", "answer": "b"}), **changes):
    """A task of short completions."""
    fields = {"rewards": (Reward("lengths", lengths),), "max_completion": 4} | changes
    return LanguageTask(model=model, prompts=as_prompts(list(rows)), **fields)


def shard(monkeypatch):
    """Weights are saved in files of at most 20 kB, where usually 5 GB are allowed."""
    hub = pytest.importorskip("huggingface_hub")
    name = "split_state_dict_into_shards_factory"
    monkeypatch.setattr(hub, name, functools.partial(getattr(hub, name), max_shard_size=20_000))


def numpy_frequencies(config):
    """Of rotary positions, float64, as published for Llama 3.1: by the lengths of waves."""
    half, rope = config["head_dim"] // 2, config["rope_scaling"] or {"rope_type": "default"}
    plain = config["rope_theta"] ** (-np.arange(half) / half)
    if rope["rope_type"] != "llama3":
        return plain / rope.get("factor", 1.0)
    low, high, context = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    wave, slow = 2 * np.pi / plain, plain / rope["factor"]
    smooth = (context / wave - low) / (high - low)
    between = (1 - smooth) * slow + smooth * plain
    return np.where(wave < context / high, plain, np.where(wave > context / low, slow, between))


def numpy_forward(folder, tokens):
    """The input of the heads after each token `[L, width]` in float64, and the published tensors, which it is from."""
    load_file = pytest.importorskip("safetensors.flax").load_file
    config = json.loads((folder / "config.json").read_text())
    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    weights = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    heads, kv_heads, size = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weights[f"{name}.weight"]

    def project(x, name):
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    def rotate(x, number):
        if config["model_type"] == "smollm3" and number % 4 == 3:
            return x
        angle = np.arange(len(x))[:, None, None] * numpy_frequencies(config)
        a, b = np.split(x, 2, axis=-1)
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x = weights["model.embed_tokens.weight"][tokens]
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        y, attention = norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn"
        q, k, v = (project(y, f"{attention}.{name}_proj").reshape(len(x), -1, size) for name in "qkv")
        if f"{attention}.q_norm.weight" in weights:
            q, k = norm(q, f"{attention}.q_norm"), norm(k, f"{attention}.k_norm")
        k, v = (np.repeat(each, heads // kv_heads, axis=1) for each in (rotate(k, number), v))
        logits = np.einsum("ihd,jhd->hij", rotate(q, number), k) / np.sqrt(size)
        logits = np.where(np.tri(len(x), dtype=bool), np.exp(logits - logits.max(-1, keepdims=True)), 0)
        attended = np.einsum("hij,jhd->ihd", logits / logits.sum(-1, keepdims=True), v).reshape(len(x), -1)
        x = x + project(attended, f"{attention}.o_proj")
        gate, up = (
            project(norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp.{name}_proj") for name in ("gate", "up")
        )
        x = x + project(gate / (1 + np.exp(-gate)) * up, f"{layer}.mlp.down_proj")
    return norm(x, "model.norm"), weights

"""What the tests of language models share: tiny folders, written in a moment, and chats."""

import numpy as np
import pytest

from grpo_jax.language import save_model
from grpo_jax.language.weights import published_names
from grpo_jax.policies import Transformer

MODEL_TYPES = {"llama": {}, "qwen2": {"attention_bias": True, "tie_embeddings": True}, "qwen3": {"qk_norm": True}}

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
        "{{ ns.count }} {{ message | tojson }}\n{% if message.role == 'assistant' %}"
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


def make_model(folder, model_type="qwen3", *, chat_template=CHATML, context=64):
    """Writes the folder of a model with 258 tokens, and returns it."""
    pytest.importorskip("jinja2")
    architecture = Transformer(
        num_layers=1, width=16, num_heads=4, num_kv_heads=2, norm_eps=1e-5, rope_base=5000.0, **MODEL_TYPES[model_type]
    )
    end = {"end_token": "<|im_end|>", "context": context, "chat_template": chat_template}
    save_model(folder, architecture, make_params(architecture, 258), make_tokenizer(), **end)
    return folder

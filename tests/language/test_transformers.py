"""Folders in transformers: what is saved loads there, with the same logits, and chats are rendered as it does."""

import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from language_models import CHAT, MODEL_TYPES, TEMPLATES, lengths, make_model, shard

from grpo_jax.commands import lm
from grpo_jax.language import load_architecture, load_model, load_params, save_trained
from grpo_jax.policies import categorical, make_token_policy

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

ARGUMENTS = {"name": "sum", "arguments": {"a": 2, "b": "é<"}}
CALLS = [
    *CHAT[:2],
    {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": ARGUMENTS}]},
    {"role": "tool", "content": "5", "tool_calls": None},
]
TEXT = "12 + 3 = 15"


def logits(folder, tokens):
    architecture, params = load_architecture(folder), load_params(folder)
    policy = make_token_policy(architecture, categorical(len(params["actor"]["embedding"])), max_steps=len(tokens))
    carry = policy.initial_carry(params, 1, None)
    return policy.sequence(params, jnp.array(tokens, jnp.int32)[:, None], carry, None)[0][:, 0]


def published_logits(folder, tokens):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_agree(tmp_path, model_type, dtype, monkeypatch):
    folder = make_model(tmp_path / "first", model_type, num_layers=4)
    changes = {"rope_base": 100.0, "norm_eps": 1e-3, "rope_scaling": (8.0, 1.0, 4.0, 16)}
    model, params = load_model(folder, **changes), load_params(folder)
    trained = jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(jax.random.key(1), leaf.shape), params)
    saved = tmp_path / "saved"
    shard(monkeypatch)
    save_trained(saved, model, trained, dtype=dtype)
    assert len([*saved.glob("*.safetensors")]) > 1
    tokens = model.tokenizer.encode(TEXT)
    ours = logits(saved, tokens)
    assert ours.std() > 0.1
    np.testing.assert_allclose(ours, published_logits(saved, tokens), atol=1e-4)
    assert (np.abs(ours - logits(folder, tokens)) > 1e-2).any(), "the trained weights, not those before"


@pytest.mark.parametrize("flags", ["", "--lora-rank 2"])
def test_a_trained_folder_answers_as_the_command_says(tmp_path, monkeypatch, flags):
    """Greedy completions of held-out prompts after training, in samples.jsonl and by transformers."""
    peft = pytest.importorskip("peft") if flags else None
    folder = make_model(tmp_path / "first", "llama", context=512)
    rows = [{"prompt": f"{a} + {b} ="} for a in range(4) for b in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setitem(sys.modules, "my_rewards", types.SimpleNamespace(lengths=lengths))
    monkeypatch.chdir(tmp_path)
    small = "--num-prompts 2 --group-size 4 --num-samples 2 --num-final 4 --num-iterations 2 --max-completion 12"
    files = f"--model {folder} --prompts prompts.jsonl --held-out prompts.jsonl --reward my_rewards:lengths"
    fixed = "--learning-rate 3e-2 --num-held-out 6 --out out"
    lm.main(lm.parse(f"{files} {small} {fixed} {flags}".split()))
    saved = "out/adapter" if flags else "out/model"
    kind = peft.AutoPeftModelForCausalLM if flags else transformers.AutoModelForCausalLM
    model, tokenizer = kind.from_pretrained(saved), transformers.AutoTokenizer.from_pretrained(saved)
    samples = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    before, after = samples[:6], samples[6:]
    assert [each["greedy"] for each in before] != [each["greedy"] for each in after]
    for sample in after:
        prompt = tokenizer(sample["prompt"], return_tensors="pt")
        answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert tokenizer.decode(answer, skip_special_tokens=True) == sample["greedy"]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_folder_that_transformers_wrote_loads_here(tmp_path, model_type):
    folder = make_model(tmp_path / "first", model_type, rope_scaling=(8.0, 1.0, 4.0, 16))
    for part in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        part.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    model = load_model(tmp_path / "saved")
    assert model.tokenizer.end_tokens == load_model(folder).tokenizer.end_tokens
    tokens = model.tokenizer.encode(TEXT)
    np.testing.assert_allclose(logits(tmp_path / "saved", tokens), logits(folder, tokens), atol=1e-6)
    assert model.tokenizer.render(CHAT) == load_model(folder).tokenizer.render(CHAT)


@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_are_rendered_as_by_transformers(tmp_path, name):
    folder = make_model(tmp_path, chat_template=TEMPLATES[name])
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), load_model(folder).tokenizer
    for chat in (CHAT, CHAT[1:], CHAT[1:2], *([CALLS] if "json" in name else [])):
        assert ours.render(chat) == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        encoded = theirs.apply_chat_template(chat, tokenize=True, add_generation_prompt=True, return_dict=True)
        assert ours.encode(chat) == encoded["input_ids"]
    if name != "json, tools and namespaces":  # which begins answers only
        text = theirs.apply_chat_template(CHAT[:3], tokenize=False, continue_final_message=True)
        assert ours.render(CHAT[:3]) == text
    tokens = ours.encode(TEXT)
    assert tokens == theirs(TEXT)["input_ids"]
    assert ours.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True) == TEXT

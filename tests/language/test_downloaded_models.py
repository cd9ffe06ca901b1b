"""Model folders from anyone: the logits of a NumPy model, no way out of the folder, and what is wrong is refused."""

import json
import math
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from language_models import CHAT, make_model, numpy_forward
from safetensors.numpy import load_file, save_file

from grpo_jax.errors import ConfigError
from grpo_jax.language import ChatTemplate, load_architecture, load_model, load_params, load_tokenizer, save_trained
from grpo_jax.language.folder import file_in
from grpo_jax.policies import categorical, make_token_policy

CONFIG, ABOUT, INDEX = "config.json", "tokenizer_config.json", "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    return make_model(tmp_path / "model")


def test_weights_outside_of_the_folder_are_refused(folder):
    shutil.copy(folder / "model.safetensors", folder.parent / "secret")
    for name in ("../secret", "/etc/hostname", "inner/../../secret", "a\x00b", "x" * 5000):
        change(folder, INDEX, {"weight_map": {"model.embed_tokens.weight": name}})
        with pytest.raises(ConfigError, match="leads out of the model's folder|cannot be read"):
            load_params(folder)


def test_links_out_of_the_folder_are_refused(tmp_path):
    loads = dict.fromkeys(("tokenizer.json", ABOUT, "chat_template.jinja", "generation_config.json"), load_tokenizer)
    loads |= {CONFIG: load_model, "model.safetensors": load_params, INDEX: load_params}
    for number, (name, load) in enumerate(loads.items()):
        folder, secret = make_model(tmp_path / str(number)), tmp_path / f"secret{number}"
        shutil.copy(folder / (CONFIG if not (folder / name).exists() else name), secret)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(f"../{secret.name}")
        with pytest.raises(ConfigError, match=f"{name} leads out of the model's folder, to {secret}; copy the file"):
            load(folder)


def test_links_within_the_folder_and_the_cache_of_hugging_face_are_followed(folder, tmp_path):
    (folder / "config.json").rename(folder / "inner.json")
    (folder / "config.json").symlink_to("inner.json")
    assert load_model(folder).architecture.vocab_size == 258
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "1234", tmp_path / "models--a--b" / "blobs"
    for part in (snapshot, blobs):
        part.mkdir(parents=True)
    for path in folder.iterdir():
        shutil.copy(path, blobs)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert load_model(snapshot).architecture.vocab_size == 258 and load_params(snapshot)
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../../model/inner.json")
    with pytest.raises(ConfigError, match="leads out"):
        load_model(snapshot)


def test_what_is_no_file_or_leads_out_is_not_copied_to_a_trained_model(folder, tmp_path):
    (folder / "merges.txt").mkdir()
    os.mkfifo(folder / "vocab.json")
    (folder / "added_tokens.json").symlink_to("added_tokens.json")
    for name in ("merges.txt", "vocab.json", "added_tokens.json"):
        with pytest.raises(ConfigError, match="is not a file|loop|levels of"):
            file_in(folder, name)
    (tmp_path / "secret").write_text("secret")
    (folder / "merges.txt").rmdir()
    (folder / "merges.txt").symlink_to("../secret")
    model, params = load_model(folder), load_params(folder)
    for path in (folder / "vocab.json", folder / "added_tokens.json"):
        path.unlink()
    with pytest.raises(ConfigError, match="merges.txt leads out of the model's folder"):
        save_trained(tmp_path / "trained", model, params)
    assert "secret" not in [path.read_text() for path in (tmp_path / "trained").glob("*.txt")]


SOURCES = [
    *("{{ ''.__class__.__mro__ }}", "{{ (messages | attr('__class__')).__base__ }}", "{{ lipsum.__globals__ }}"),
    *("{{ cycler.__init__.__globals__.os.system('true') }}", "{{ raise_exception.__globals__ }}"),
    *("{{ strftime_now.__globals__['datetime'] }}", "{{ strftime_now.__code__ }}", "{{ self.__init__.__globals__ }}"),
    *("{{ '{0.__class__.__init__}'.format(messages) }}", "{{ ('{0.__class__}' | attr('format'))(messages) }}"),
    *("{{ messages.append(1) }}", "{{ messages[0].update({'role': 'x'}) }}", "{% include '/etc/hostname' %}"),
    *("{% import 'os' as os %}{{ os }}", "{% for i in range(99999999) %}{{ i }}{% endfor %}"),
    "{{ messages | tojson(default=raise_exception.__call__.__self__) }}",
]


def test_templates_stay_in_the_sandbox():
    messages = [{"role": "user", "content": "x"}]
    for source in SOURCES:
        try:
            assert ChatTemplate(source, {}).render(messages) == "", f"an attribute that is not there: {source}"
        except ConfigError as error:
            assert "chat template refuses" in str(error)
        assert messages == [{"role": "user", "content": "x"}]


def change(folder, name, changes):
    """Removes a file, replaces its text or bytes, or some fields of its object."""
    path = folder / name
    if changes is None:
        return path.unlink()
    if isinstance(changes, dict):
        changes = json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes)
    path.write_bytes(changes if isinstance(changes, bytes) else changes.encode())


def read_chat(folder):
    return load_tokenizer(folder).encode(CHAT)


def header(size):
    return size.to_bytes(8, "little") + b'{"a":{}}'


TEMPLATES = ["{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "{% break %}", "{{ " + "9" * 5000 + " }}", "{% if %}"]
TEMPLATES += ["{% for each in messages %}" * 30 + "{% endfor %}" * 30]
ROPES = {"rope_type": "dynamic", "factor": 2.0}, {"type": []}, {"partial_rotary_factor": 0.5}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3 |= {"type": "llama3"}
BAD_ROPES = [LLAMA3 | dict([pair]) for pair in zip(LLAMA3, (math.nan, 4.0, "8", [8192]), strict=False)]
LACKS = "lacks 'model.layers.*input_layernorm"
WRONG = [
    ("tokenizer.json", [None], load_model, "has no tokenizer.json; name the folder of a model"),
    ("tokenizer.json", ["{"], load_model, "tokenizer.json cannot be read"),
    (CONFIG, [None, "[1]"], load_model, "config.json cannot be read"),
    (CONFIG, ['{"model_type": "qwen3", "eos_token_id": 0}'], load_model, "config.json lacks vocab_size, hidden_size"),
    (CONFIG, [{"eos_token_id": 300}], load_model, "the tokenizer has the token 300, but the model only vocab_size=258"),
    (CONFIG, [{"vocab_size": 300}], load_params, r"embed_tokens.weight .*: \(258, 16\) instead of \(300, 16\)"),
    (CONFIG, [{"num_hidden_layers": 2}, {"num_hidden_layers": 10**9}], load_params, LACKS),
    (CONFIG, [{"model_type": "gemma3"}], load_model, "model_type='gemma3' is not supported; use one of llama, qwen2"),
    *(
        (CONFIG, [{field: each} for each in ropes], load_model, message)
        for field in ("rope_scaling", "rope_parameters")
        for ropes, message in (
            (ROPES, "are not supported, only the types default, linear, llama3, of whole heads"),
            ([{"type": "linear"}], r"config.json lacks factor \(linear rope\)"),
            ([LLAMA3 | {"low_freq_factor": None}], r"config.json lacks low_freq_factor \(llama3 rope\)"),
            (BAD_ROPES, "config.json: rope_scaling=.* must be .*low < high"),
        )
    ),
    (CONFIG, [{"no_rope_layers": [1, 0]}], load_model, "only 0 at each 4th layer of smollm3"),
    (CONFIG, [{"hidden_act": "gelu"}], load_model, "hidden_act='gelu' is not supported, only 'silu'"),
    (CONFIG, [{"use_sliding_window": True}, {"attention_bias": True}], load_model, "=True is not supported, only F"),
    (CONFIG, [{"layer_types": ["full_attention", "sliding_attention"]}], load_model, "has 'sliding_attention'"),
    (CONFIG, [{"quantization_config": {"bits": 4}}], load_model, "quantization_config"),
    (CONFIG, [{"architectures": ["LlamaForSequenceClassification"]}], load_params, "no language model but a scorer"),
    (ABOUT, [{"split_special_tokens": True}], load_model, "split_special_tokens is not supported"),
    (ABOUT, [{"chat_template": None}], read_chat, "the model's folder has no chat template"),
    (ABOUT, [{"chat_template": "{{ raise_exception('must alternate') }}"}], read_chat, "refuses .*must alternate"),
    (ABOUT, [{"chat_template": "{{ messages[0].content + 1 }}"}], read_chat, "chat template refuses .*str"),
    (ABOUT, [{"chat_template": each} for each in TEMPLATES], load_model, "the model's chat template is not Jinja"),
    (
        *(ABOUT, [{"chat_template": each} for each in (3, {"a": 1}, [3], [{"name": "default", "template": 3}], [[]])]),
        *(load_model, r"tokenizer_config.json: chat_template=.* must be str \| list"),
    ),
    ("model.safetensors", [b"?", *map(header, (2**40, 2**63, 2**64 - 1, 0, 10**8 + 1))], load_params, "cannot be read"),
    (
        *(INDEX, [{"weight_map": each} for each in (3, [], {"a": 3}, {"a": None}, "x")], load_params),
        "index.json: weight_map=.* must be .*dict",
    ),
    (INDEX, [{}, {"weight_map": {}}, {"weight_map": None}], load_params, LACKS),
    (INDEX, ["[1]", "{"], load_params, "index.json cannot be read"),
]
NOT_NUMBERS = "16", [1], True, math.nan, math.inf, -1, 0, 10**400
FIELDS = "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "num_key_value_heads", "head_dim"
DAMAGED = {
    **dict.fromkeys((*FIELDS, "intermediate_size", "max_position_embeddings"), (1.5, 16.0, 10**9 + 0.5, *NOT_NUMBERS)),
    **{"rope_theta": NOT_NUMBERS, "rms_norm_eps": NOT_NUMBERS, "rope_parameters": (3, [], "x")},
    **{"model_type": (3, [], {}), "eos_token_id": ("x", 1.5, ["x"], {}, True), "layer_types": ("x", [1])},
}
BASES = [{"rope_theta": None, "rope_parameters": {"rope_theta": each}} for each in (*NOT_NUMBERS, 0.0)]
WRONG += [(CONFIG, BASES, load_model, "config.json: rope_base=")]
WRONG += [(CONFIG, [{field: value} for value in DAMAGED[field]], load_model, "config.json") for field in DAMAGED]


@pytest.mark.parametrize("name", dict.fromkeys(each[0] for each in WRONG))
def test_a_folder_with_something_wrong_is_refused(name, tmp_path):
    folder = make_model(tmp_path / "model", "llama")
    before = (folder / name).read_bytes() if (folder / name).exists() else b"{}"
    for _, changes, load, message in (each for each in WRONG if each[0] == name):
        for each in changes:
            (folder / name).write_bytes(before)
            change(folder, name, each)
            with pytest.raises(ConfigError, match=message):
                load(folder)


def test_gguf_files_are_refused(folder):
    (folder / "model.gguf").touch()
    (folder / CONFIG).unlink()
    for path, found in ((folder, "has .*model.gguf"), (folder / "model.gguf", "model.gguf is a file")):
        with pytest.raises(ConfigError, match=f"{found}.*; GGUF is not read, but transformers makes a folder of it"):
            load_model(path)


def test_a_folder_without_an_end_token_is_refused(folder):
    change(folder, "generation_config.json", {"eos_token_id": [7, 9]})
    assert load_tokenizer(folder).end_tokens == (7, 9, 0), "those of config.json count too"
    for name in ("generation_config.json", ABOUT):
        change(folder, name, None)
    assert load_tokenizer(folder).end_tokens == (0,)
    contents = json.loads((folder / "tokenizer.json").read_text())
    change(folder, "tokenizer.json", {"added_tokens": [], "model": contents["model"] | {"vocab": {}}})
    assert load_tokenizer(folder).num_tokens == 1, "the end token"
    change(folder, "tokenizer.json", contents)
    change(folder, CONFIG, {"eos_token_id": None})
    with pytest.raises(ConfigError, match="names no end token, so completions never end"):
        load_model(folder)


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_weights_that_are_no_finite_floats_or_of_another_size_are_named(folder):
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.0.self_attn.q_proj.weight"
    said = "(has weights that are not finite|is (int32|uint8|bool);|.*instead of)"
    for wrong in (np.nan, np.inf, np.float64(1e300), np.int32(1), np.uint8(1), np.bool_(True), None):
        array = tensors[name][:, :8] if wrong is None else tensors[name].astype(getattr(wrong, "dtype", np.float32))
        array.flat[3] = wrong or 0
        save_file(tensors | {name: array}, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ConfigError, match=f"{name}.* {said}"):
            load_params(folder)


SIZES = {
    **{"llama": {"num_layers": 2, "rope_scaling": (8.0, 1.0, 4.0, 16)}, "qwen2": {"rope_scaling": (4.0,)}},
    **{"qwen3": {"head_size": 6}, "smollm3": {"num_layers": 4}},
}
TOKENS = np.array([[3, 1, 4, 10, 5, 9], [2, 6, 0, 7, 7, 1]])


def in_shards(folder):
    """The weights of a folder in bfloat16, in two files."""
    flax, files, weight_map = pytest.importorskip("safetensors.flax"), ({}, {}), {}
    for number, (name, tensor) in enumerate(sorted(flax.load_file(folder / "model.safetensors").items())):
        files[number % 2][name], weight_map[name] = tensor.astype(jnp.bfloat16), f"model-{number % 2}.safetensors"
    (folder / "model.safetensors").unlink()
    for number, tensors in enumerate(files):
        flax.save_file(tensors, folder / f"model-{number}.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("model_type", SIZES)
def test_logits_are_those_of_the_published_architecture(tmp_path, model_type):
    make_model(tmp_path, model_type, **SIZES[model_type])
    if model_type == "qwen3":
        in_shards(tmp_path)
    architecture, params = load_architecture(tmp_path), load_params(tmp_path)
    policy = make_token_policy(architecture, categorical(258), max_steps=4)
    assert jax.eval_shape(lambda: params) == jax.eval_shape(policy.init, jax.random.key(0))

    @jax.jit
    def read(params):
        carry = policy.initial_carry(params, 2, jnp.asarray(TOKENS[:, :2]))
        return policy.sequence(params, jnp.asarray(TOKENS[:, 2:].T), carry, None)[0]

    def logits(text):
        features, weights = numpy_forward(tmp_path, text)
        return features @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T

    expected = np.stack([logits(text)[2:] for text in TOKENS], axis=1)
    assert expected.std() > 0.5
    np.testing.assert_allclose(read(params), expected, atol=1e-4)

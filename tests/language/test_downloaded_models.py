"""Model folders from anyone: no file leads out of them, templates stay in the sandbox, headers are bounded."""

import json
import math
import os
import shutil

import numpy as np
import pytest
from language_models import make_model
from safetensors.numpy import load_file, save_file

from grpo_jax.errors import ConfigError
from grpo_jax.language import ChatTemplate, load_model, load_params, load_tokenizer, save_trained
from grpo_jax.language.folder import file_in
from grpo_jax.language.weights import load_scorer_params


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    return make_model(tmp_path / "model")


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "inner/../../secret", "a\x00b", "x" * 5000])
def test_weights_outside_of_the_folder_are_refused(name, folder):
    shutil.copy(folder / "model.safetensors", folder.parent / "secret")
    index = {"weight_map": {"model.embed_tokens.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="leads out of the model's folder|cannot be read"):
        load_params(folder)


@pytest.mark.parametrize("damaged", [3, [], {}, {"a": 3}, {"a": None}, "x", None])
def test_a_damaged_index_is_named(damaged, folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": damaged}))
    with pytest.raises(ConfigError, match="index.json cannot be read: its weight_map must give files by tensor"):
        load_params(folder)


@pytest.mark.parametrize(
    "name, load",
    [
        *[("config.json", load_model), ("tokenizer.json", load_tokenizer), ("tokenizer_config.json", load_tokenizer)],
        *[("chat_template.jinja", load_tokenizer), ("generation_config.json", load_tokenizer)],
        *[("model.safetensors", load_params), ("model.safetensors.index.json", load_params)],
    ],
)
def test_links_out_of_the_folder_are_refused(name, load, folder):
    secret = folder.parent / "secret"
    shutil.copy(folder / ("config.json" if not (folder / name).exists() else name), secret)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../secret")
    with pytest.raises(ConfigError, match=f"{name} leads out of the model's folder, to {secret}; copy the file"):
        load(folder)


def test_links_within_the_folder_and_the_cache_of_hugging_face_are_followed(folder, tmp_path):
    (folder / "config.json").rename(folder / "inner.json")
    (folder / "config.json").symlink_to("inner.json")
    assert load_model(folder).vocab_size == 258
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "1234", tmp_path / "models--a--b" / "blobs"
    for part in (snapshot, blobs):
        part.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert load_model(snapshot).vocab_size == 258 and load_params(snapshot)
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../../model/inner.json")
    with pytest.raises(ConfigError, match="leads out"):
        load_model(snapshot)


def test_a_link_out_of_the_folder_is_not_copied_to_a_trained_model(folder, tmp_path):
    model, params = load_model(folder), load_params(folder)
    (tmp_path / "secret").write_text("secret")
    (folder / "merges.txt").symlink_to("../secret")
    with pytest.raises(ConfigError, match="merges.txt leads out of the model's folder"):
        save_trained(tmp_path / "trained", model, params)
    assert "secret" not in [path.read_text() for path in (tmp_path / "trained").glob("*.txt")]


def test_what_is_no_file_is_refused(folder):
    (folder / "merges.txt").mkdir()
    os.mkfifo(folder / "vocab.json")
    (folder / "added_tokens.json").symlink_to("added_tokens.json")
    for name, said in (
        ("merges.txt", "is not a file"),
        ("vocab.json", "is not a file"),
        ("added_tokens.json", "loop|levels of"),
    ):
        with pytest.raises(ConfigError, match=said):
            file_in(folder, name)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ (messages | attr('__class__')).__base__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['datetime'] }}",
        "{{ strftime_now.__code__ }}",
        "{{ '{0.__class__.__init__}'.format(messages) }}",
        "{{ ('{0.__class__}' | attr('format'))(messages) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% include '/etc/hostname' %}",
        "{% import 'os' as os %}{{ os }}",
        "{{ self.__init__.__globals__ }}",
        "{{ lipsum.__globals__ }}",
        "{% for i in range(99999999) %}{{ i }}{% endfor %}",
        "{{ messages | tojson(default=raise_exception.__call__.__self__) }}",
    ],
)
def test_templates_stay_in_the_sandbox(source):
    messages = [{"role": "user", "content": "x"}]
    try:
        assert ChatTemplate(source, {}).render(messages) == "", "an attribute that is not there"
    except ConfigError as error:
        assert "chat template refuses" in str(error)
    assert messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{% for each in messages %}" * 30 + "{% endfor %}" * 30,
        "{% break %}",
        "{{ " + "9" * 5000 + " }}",
    ],
    ids=["parentheses", "loops", "break", "digits"],
)
def test_a_template_that_python_cannot_compile_is_refused(source):
    with pytest.raises(ConfigError, match="chat template is not Jinja: "):
        ChatTemplate(source, {})


@pytest.mark.parametrize("template", [3, {"a": 1}, [3], [{"name": "default", "template": 3}], [[]]])
def test_a_damaged_template_is_named(template, folder):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    with pytest.raises(ConfigError, match="tokenizer_config.json: chat_template must be a text"):
        load_tokenizer(folder)


def test_a_damaged_base_of_rotary_positions_is_named(folder):
    path = folder / "config.json"
    contents = json.loads(path.read_text()) | {"rope_theta": None}
    for wrong in ([1], "x", 0.0):
        path.write_text(json.dumps(contents | {"rope_parameters": {"rope_theta": wrong}}))
        with pytest.raises(ConfigError, match="config.json: rope_base="):
            load_model(folder)


def test_a_tokenizer_without_tokens_has_its_end_token(folder):
    path = folder / "tokenizer.json"
    contents = json.loads(path.read_text())
    path.write_text(json.dumps(contents | {"added_tokens": [], "model": contents["model"] | {"vocab": {}}}))
    assert load_tokenizer(folder).num_tokens == 1


@pytest.mark.parametrize("claimed", [2**40, 2**63, 2**64 - 1, 0, 100_000_001])
def test_the_size_of_a_header_is_bounded(claimed, folder):
    path = folder / "model.safetensors"
    path.write_bytes(claimed.to_bytes(8, "little") + path.read_bytes()[8:])
    with pytest.raises(ConfigError, match="model.safetensors cannot be read"):
        load_params(folder)


NOT_NUMBERS = "16", [1], True, math.nan, math.inf, -1, 0, 10**400
DAMAGED = {
    **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"), (None, 1.5, 16.0)),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings"), (1.5, 2.0)),
    **{"rope_theta": (), "rms_norm_eps": (), "rope_parameters": (3, [], "x"), "model_type": (3, None, [], {})},
    **{"layer_types": (["sliding_attention"],), "eos_token_id": ("x", 1.5, ["x"], {}, True)},
}


@pytest.mark.parametrize("field", DAMAGED)
def test_a_damaged_field_of_the_config_is_named(field, folder):
    path, is_number = folder / "config.json", field not in ("rope_parameters", "model_type", "eos_token_id")
    described = json.loads(path.read_text())
    large = (10**9,) if field.startswith(("hidden", "num_hidden", "vocab")) else ()
    for value in (*DAMAGED[field], *large, *(NOT_NUMBERS if is_number else ())):
        path.write_text(json.dumps(described | {field: value}))
        with pytest.raises(ConfigError) as refused:
            load_model(folder)
            load_params(folder)
        assert str(folder) in str(refused.value) or field in str(refused.value)


@pytest.mark.parametrize(
    "wrong", [np.nan, np.inf, np.float64(1e300), np.int32(1), np.uint8(1), np.bool_(True)], ids=repr
)
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_weights_that_are_no_finite_floats_are_named(wrong, folder):
    """Of a model, and of the head of a scorer."""
    tensors = load_file(folder / "model.safetensors") | {"score.weight": np.zeros((1, 16), np.float32)}
    for name, load in {"model.norm.weight": load_params, "score.weight": load_scorer_params}.items():
        array = tensors[name].astype(getattr(wrong, "dtype", np.float32))
        array.flat[3] = wrong
        save_file(tensors | {name: array}, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ConfigError, match=f"{name}.* (has weights that are not finite|is (int32|uint8|bool); use)"):
            load(folder)


def test_a_scorer_is_no_language_model(folder):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["Qwen3ForSequenceClassification"]}))
    with pytest.raises(ConfigError, match="is a scorer .*, not a language model; use load_scorer"):
        load_params(folder)

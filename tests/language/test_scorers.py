"""Rewards by a model: a scorer is trained here, and its scores are those of a NumPy forward pass."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from language_models import CHAT, make_model, make_params, make_tokenizer, numpy_forward
from safetensors.numpy import load_file, save_file

from grpo_jax.commands import lm
from grpo_jax.environments.tokens import Completion
from grpo_jax.errors import ConfigError
from grpo_jax.language import (
    LanguageTask,
    Reward,
    as_prompts,
    language_environment,
    load_model,
    load_scorer,
    save_model,
)
from grpo_jax.policies import Transformer
from grpo_jax.recording.identity import identity

PROMPTS = ["12", "", "a+b", "x"]
COMPLETIONS = ["aab", "bbbb", "a\nb\n\na", "b" * 25 + "a"]


def make_scorer(folder, *, model_type="llama", num_labels=1, **fields):
    """Writes a scorer with random weights, as transformers would."""
    make_model(folder, model_type)
    weights = load_file(folder / "model.safetensors")
    weights.pop("lm_head.weight", None)
    weights["score.weight"] = np.random.default_rng(0).normal(size=(num_labels, 16)).astype(np.float32)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    kind = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[model_type]
    about = {"architectures": [f"{kind}ForSequenceClassification"], "pad_token_id": 0}
    about |= {"id2label": {str(index): f"label {index}" for index in range(num_labels)}}
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | about | fields))
    return folder


def numpy_scores(folder, tokens):
    """The scores after each token `[L, num_labels]`, in float64, from the published tensors."""
    features, weights = numpy_forward(folder, tokens)
    return features @ weights["score.weight"].T


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_scorer(tmp_path_factory.mktemp("scorers") / "random", num_labels=3)


def test_scores_are_those_of_a_numpy_forward_pass_in_every_batch(folder):
    tokenizer = load_model(folder).tokenizer
    for label, index in {"label 1": 1, "2": 2}.items():
        pairs = zip(PROMPTS, COMPLETIONS, strict=True)
        oracle = [numpy_scores(folder, tokenizer.encode(prompt + text))[-1, index] for prompt, text in pairs]
        assert np.std(oracle) > 0.1
        for batch_size in (1, 3, 16):
            scorer = dataclasses.replace(load_scorer(folder, label=label), batch_size=batch_size)
            np.testing.assert_allclose(scorer(PROMPTS, COMPLETIONS), oracle, atol=1e-5)
            np.testing.assert_allclose(scorer(PROMPTS[::-1], COMPLETIONS[::-1]), oracle[::-1], atol=1e-5)


def test_a_chat_is_read_by_the_scorers_own_template_and_padding_is_not_scored(folder):
    scorer = load_scorer(folder, label="0")
    answer = [{"role": "assistant", "content": "8"}]
    text = scorer.model.tokenizer.render([*CHAT[1:2], *answer], add_generation_prompt=False)
    assert text.endswith("<|im_start|>assistant\n8<|im_end|>\n")
    tokens = scorer.model.tokenizer.encode_part(text)
    np.testing.assert_allclose(scorer([CHAT[1:2]], [answer]), [numpy_scores(folder, tokens)[-1, 0]], atol=1e-5)
    begun = scorer([[*CHAT[1:2], *answer]], [[{"role": "assistant", "content": "0"}]])
    assert begun == scorer([CHAT[1:2]], [[{"role": "assistant", "content": "80"}]]), "the answer goes on"
    assert scorer(as_prompts([{"prompt": "a"}]), ["b"]) == scorer(["a"], ["b"])
    padded = scorer(["a"], ["b<|im_end|>"])  # as in transformers, where the end token is often the padding as well
    np.testing.assert_allclose(padded, scorer(["a"], ["b"]), atol=1e-5)
    assert abs(dataclasses.replace(scorer, pad_token=None)(["a"], ["b<|im_end|>"])[0] - padded[0]) > 1e-3
    no_token = "reads 1 to 64 tokens .* completion has 0; change the prompt"
    for wrong, message in (("ab", "are a list"), ({"a": 1}, "are a list"), ([3], "is a text"), (["a", ""], no_token)):
        with pytest.raises(ConfigError, match=message):
            scorer(wrong, ["c", ""])


def test_a_scorer_rewards_another_models_completions(tmp_path):
    """Their tokenizers differ: that of the policy numbers its tokens in another order."""
    tokenizer = make_tokenizer()
    vocabulary = {token: 257 - number for token, number in tokenizer.get_vocab().items()}
    tokenizer.model = type(tokenizer.model)(vocabulary, [])
    architecture = Transformer(num_layers=1, width=16, num_heads=2, qk_norm=True)
    params = make_params(architecture, 258)
    save_model(tmp_path / "policy", architecture, params, tokenizer, end_token="<|im_end|>", context=64)
    model, folder = load_model(tmp_path / "policy"), make_scorer(tmp_path / "judge", model_type="qwen3")
    (reward,) = lm.load_rewards(lm.parse(f"--model m --prompts p --reward-model {folder}=0.5".split()))
    assert (reward.name, reward.weight) == ("judge", 0.5)
    prompts = as_prompts([{"prompt": "b"}, {"prompt": "a"}])
    task = LanguageTask(model=model, prompts=prompts, rewards=(reward,), max_completion=5)
    rows, own = [model.tokenizer.encode(text) for text in ("bbcd", "abca", "aacb")], reward.function.model.tokenizer
    assert rows[1] != own.encode("abca")
    tokens, env = np.array([[*row, -1] for row in rows]), language_environment(task)
    states = Completion(jnp.array([0, 0, 1]), jnp.array(tokens), jnp.array([4, 4, 4]))
    paid = jax.jit(env.outcome)(states, {name: jnp.broadcast_to(value, 3) for name, value in env.params.items()})
    oracle = [numpy_scores(folder, own.encode(text))[-1, 0] for text in ("bbbcd", "babca", "aaacb")]
    np.testing.assert_allclose(np.asarray(paid.values)[:, 0], oracle, atol=1e-5)
    np.testing.assert_allclose(paid.values, task.judge(np.array([0, 0, 1]), tokens)[0], atol=1e-5)


def test_another_scorer_is_another_run(folder, tmp_path):
    other = make_scorer(tmp_path, model_type="qwen3")
    described = [identity(load_scorer(each, label="0")) for each in (other, folder, folder)]
    assert described[0] != described[1] == described[2] != identity(load_scorer(folder, label="1"))


def test_what_is_no_scorer_is_refused(folder, tmp_path):
    def refuse(path, message, **options):
        with pytest.raises(ConfigError, match=message):
            load_scorer(path, **options)

    refuse(folder, "has the labels {'0': 'label 0', .*}; choose one by its name or its number")
    refuse(folder, "has the labels .*'label 2'}, and '3' is not exactly one of them", label="3")
    refuse(make_model(tmp_path), "is no scorer but .*Qwen3ForCausalLM.*; name a folder in the layout")
    same = make_scorer(tmp_path, num_labels=3, id2label={"0": "good", "1": "bad", "2": "bad"})
    refuse(same, "'bad' is not exactly one of them", label="bad")
    assert load_scorer(same, label="good") and load_scorer(same, label="2")
    refuse(make_scorer(tmp_path, vocab_size=100), "the tokenizer has the token 257, but the model only vocab_size=100")
    weights = load_file(make_scorer(tmp_path) / "model.safetensors")
    weights.pop("score.weight")
    save_file(weights, tmp_path / "model.safetensors")
    refuse(tmp_path, "lacks 'score.weight'")


def test_prompts_that_a_scorer_cannot_read_are_refused(folder, tmp_path):
    model, plain = load_model(make_model(tmp_path, context=512)), tmp_path / "plain"
    shutil.copytree(folder, plain)
    (plain / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    long, chat = [{"prompt": "b"}, {"prompt": "b" * 70}], [{"messages": CHAT[1:2]}]
    too_long = "prompt 1: .* reads 1 to 64 tokens .* completion has 71; change the prompt"
    for path, rows, message in ((folder, long, too_long), (plain, chat, "no chat template")):
        reward = Reward("score", load_scorer(path, label="0"))
        with pytest.raises(ConfigError, match=message):
            LanguageTask(model=model, prompts=as_prompts(rows), rewards=(reward,), max_completion=5)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_scores_are_those_of_transformers(tmp_path, model_type):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    folder = make_scorer(tmp_path / "ours", model_type=model_type, num_labels=2)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="right")
    texts = [prompt + text for prompt, text in zip(PROMPTS, COMPLETIONS, strict=True)]
    with torch.no_grad():
        logits = theirs(**tokenizer(texts, padding=True, return_tensors="pt")).logits.numpy()
    ours = np.stack([load_scorer(folder, label=label)(PROMPTS, COMPLETIONS) for label in "01"], axis=-1)
    np.testing.assert_allclose(ours, logits, atol=1e-4)
    shutil.copytree(folder, tmp_path / "saved")
    theirs.save_pretrained(tmp_path / "saved")
    np.testing.assert_allclose(load_scorer(tmp_path / "saved", label="1")(PROMPTS, COMPLETIONS), ours[:, 1], atol=1e-5)

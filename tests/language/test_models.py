"""Checkpoints in the published layout of Llama, Qwen2 and Qwen3, against a NumPy implementation."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from language_models import make_model, numpy_forward

from grpo_jax.language import load_architecture, load_params
from grpo_jax.policies import make_token_policy
from grpo_jax.policies.distributions import categorical

SIZES = {"llama": {"num_layers": 2}, "qwen2": {}, "qwen3": {"head_size": 6}}
TOKENS = np.array([[3, 1, 4, 10, 5, 9], [2, 6, 0, 7, 7, 1]])


def in_shards(folder):
    """The weights of a folder in bfloat16, in two files."""
    flax = pytest.importorskip("safetensors.flax")
    weights, files = flax.load_file(folder / "model.safetensors"), {}
    (folder / "model.safetensors").unlink()
    for number, name in enumerate(sorted(weights)):
        files.setdefault(f"model-0000{number % 2 + 1}-of-00002.safetensors", {})[name] = weights[name].astype(
            jnp.bfloat16
        )
    for file, part in files.items():
        flax.save_file(part, folder / file)
    index = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


@pytest.mark.parametrize("model_type", SIZES)
def test_logits_are_those_of_the_published_architecture(tmp_path, model_type):
    make_model(tmp_path, model_type, **SIZES[model_type])
    if model_type == "qwen3":
        in_shards(tmp_path)
    architecture, params = load_architecture(tmp_path), load_params(tmp_path)
    policy = make_token_policy(architecture, categorical(258), max_steps=4)
    drawn = jax.eval_shape(policy.init, jax.random.key(0))
    assert jax.eval_shape(lambda: params) == drawn

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

"""LoRA: the model begins as its base, only adapters are trained, and merging them changes no output."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from probes import NUM_TOKENS, bits, copy_task

from grpo_jax import GRPO, PPO, Config, Hyperparams, make_init, make_train_step, with_reference
from grpo_jax.groups import FRESH
from grpo_jax.policies import Transformer, add_lora, make_token_policy, merge_lora, partition
from grpo_jax.policies.dense import Dense
from grpo_jax.policies.distributions import categorical

BASE = Transformer(width=16, num_heads=4, num_kv_heads=2, num_layers=1, attention_bias=True)
LORA = dataclasses.replace(BASE, lora_rank=3, lora_alpha=6.0)
SMALL = {"environment": copy_task(), "num_envs": 8, "group_size": 4, "num_epochs": 1, "num_minibatches": 2}
TOKENS = jax.random.randint(jax.random.key(3), (4, 5), 0, NUM_TOKENS)
PROMPTS = jnp.array([[3, 1, 4]] * 5)


def logits(architecture, params):
    policy = make_token_policy(architecture, categorical(NUM_TOKENS), max_steps=4)

    carry = policy.sequence_carry(jax.jit(policy.initial_carry, static_argnums=1)(params, 5, PROMPTS))
    return jax.jit(policy.sequence)(params, TOKENS, carry, None)[0]


def size(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


@pytest.mark.slow
def test_the_model_begins_as_its_base_and_merges_into_one():
    params = jax.jit(make_token_policy(BASE, categorical(NUM_TOKENS), max_steps=4).init)(jax.random.key(0))
    with_adapters = add_lora(LORA, params, jax.random.key(1))
    np.testing.assert_array_equal(logits(LORA, with_adapters), logits(BASE, params))
    architecture, merged = merge_lora(LORA, with_adapters)
    assert architecture == BASE and bits(merged) == bits(params)

    def lively(path, leaf):
        draws = 0.3 * jax.random.normal(jax.random.key(leaf.size), leaf.shape)
        return leaf + draws * (path[-1].key == "lora_b")

    changed = jax.tree_util.tree_map_with_path(lively, with_adapters)
    difference = logits(LORA, changed) - logits(BASE, params)
    assert jnp.max(jnp.abs(difference)) > 0.01
    np.testing.assert_allclose(logits(*merge_lora(LORA, changed)), logits(LORA, changed), atol=1e-5)


def test_a_layer_is_the_formula_and_so_is_its_gradient():
    layer = Dense(5, adapter=(2, 1.5))
    draws = np.random.default_rng(0)
    x, into, b = (draws.normal(size=size).astype(np.float32) for size in ((7, 4), (7, 5), (2, 5)))
    params = jax.jit(layer.init)(jax.random.key(2), x)["params"]
    assert np.abs(params["lora_a"]).max() <= 0.5 and not params["lora_b"].any()  # 1 / sqrt(4)
    params["lora_b"] = b
    total = jax.value_and_grad(lambda params: jnp.sum(layer.apply({"params": params}, x) * into))
    output, gradient = jax.jit(total)(params)
    w, bias, a, b = (np.float64(params[name]) for name in ("kernel", "bias", "lora_a", "lora_b"))
    x, into = np.float64(x), np.float64(into)
    np.testing.assert_allclose(output, np.sum((x @ (w + 1.5 * a @ b) + bias) * into), rtol=1e-5)
    np.testing.assert_allclose(gradient["lora_a"], 1.5 * x.T @ into @ b.T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradient["lora_b"], 1.5 * (x @ a).T @ into, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_train_step_has_state_for_adapters_only_and_changes_nothing_else():
    architecture = dataclasses.replace(LORA, frozen_dtype="bfloat16")
    config = Config(**SMALL, algorithm=with_reference(GRPO), network=architecture)
    params = add_lora(architecture, Config(**SMALL, network=BASE).policy.init(jax.random.key(5)), jax.random.key(6))
    hyperparams = Hyperparams(learning_rate=0.01, entropy_coef=0.1)
    start = jax.jit(make_init(config))(jax.random.key(0), hyperparams, params=params)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, config.policy.init(jax.random.key(0)))
    state, metrics = jax.jit(make_train_step(config))(start)

    sizes, rank = BASE.sizes, 3
    qkv = BASE.width + (sizes.heads + 2 * sizes.kv_heads) * sizes.head
    out, feedforward = sizes.heads * sizes.head + BASE.width, 2 * BASE.width + 3 * sizes.feedforward
    num_trained = rank * (qkv + out + feedforward)
    assert size(start.reference_params) == num_trained
    assert size(start.opt_state) == 2 * num_trained + 1  # Adam's moments and its counter
    before, after = flatten_dict(start.params), flatten_dict(state.params)
    changed = {path[-1] for path in before if bits(before[path]) != bits(after[path])}
    assert changed == {"lora_a", "lora_b"}
    assert {x.dtype.name for path, x in after.items() if path[-1] in ("kernel", "bias", "embedding")} == {"bfloat16"}
    assert metrics["optim/grad_norm"] > 0


@pytest.mark.parametrize("shared", [True, False])
def test_a_critic_has_all_its_weights_trained(shared):
    network = dataclasses.replace(LORA, shared_critic=shared)
    policy = Config(**SMALL, algorithm=PPO._replace(start=FRESH), network=network).policy
    trained = flatten_dict(partition(policy, jax.eval_shape(policy.init, jax.random.key(0)))[0])
    others = {path for path, leaf in trained.items() if leaf is not None and path[-1] not in ("lora_a", "lora_b")}
    expected = {("actor_critic", "value", "kernel"), ("actor_critic", "value", "bias")}
    assert others == (expected if shared else {path for path in trained if path[0] == "critic"})
    assert not any("lora_a" in path for path in trained if path[0] == "critic")

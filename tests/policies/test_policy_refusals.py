"""What a policy cannot be: the message says what to write instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import check, copy_task

from grpo_jax import Config, Sampling, generate
from grpo_jax.environments.spaces import Box
from grpo_jax.errors import ConfigError
from grpo_jax.policies import CNN, MLP, Transformer, make_pure_policy, make_token_policy
from grpo_jax.policies.distributions import categorical, diagonal_gaussian, make_distribution
from grpo_jax.policies.transformer import add_lora, merge_lora

INF = np.inf
IMAGE = jax.ShapeDtypeStruct((6, 5, 2), jnp.int8)


def seen_by_cnn(observation):
    return jax.eval_shape(CNN()(observation, categorical(3), True).init, jax.random.key(0))


def chunked(**fields):
    return Config(**{"environment": copy_task(), "network": Transformer(), "num_envs": 8, "group_size": 4} | fields)


def generated(prompts, **options):
    policy = make_token_policy(Transformer(), categorical(7), max_steps=5)
    key = jax.random.key(0)
    return jax.eval_shape(lambda: generate(policy, policy.init(key), prompts, key, Sampling(**options)))


def custom(**fields):
    """A run of a network with other fields of its policy."""

    def network(*arguments):
        return make_pure_policy(
            lambda key, x: dict.fromkeys(("torso", "critic"), jnp.ones(4)),
            lambda params, x: (x[:, :2] * params["torso"][:2], x @ params["critic"]),
            *arguments,
        )._replace(**fields)

    check(Config(network=network, algorithm="ppo"))


LORA = Transformer(lora_rank=4)
REFUSED = [
    (lambda: CNN(hidden_sizes=(64, -1)), r"hidden_sizes=\(64, -1\) .*such as \(64, 64\)"),
    (lambda: CNN(hidden_sizes=64), r"hidden_sizes=64 .*such as \(64, 64\)"),
    (lambda: CNN(conv_channels=0), "conv_channels=0 is not a positive integer"),
    (lambda: CNN(activation="rellu"), "unknown activation 'rellu': did you mean 'relu'"),
    (lambda: CNN(activation=np.tanh), "unknown activation"),
    (lambda: CNN(recurrent="grru"), "unknown recurrent 'grru': did you mean 'gru'"),
    (lambda: CNN(actor_init_gain=-1.0), "actor_init_gain=-1.0 is no gain"),
    (lambda: CNN(hidden_size=3), "CNN has no field 'hidden_size': did you mean 'hidden_sizes'"),
    (lambda: MLP(shared_critic=True, actor_observation=("place",)), "actor_observation=.*shared_critic=True"),
    (lambda: seen_by_cnn(jax.ShapeDtypeStruct((4,), jnp.int8)), r"one image.*\(4,\), 0 are images; use network='mlp'"),
    (lambda: seen_by_cnn({"a": IMAGE, "b": IMAGE}), "one image.*, 2 are images.*network='mlp'"),
    (lambda: Config(network=MLP(recurrent="gru"), algorithm="ppo", num_envs=8), "= 8 .*use num_minibatches=8"),
    (lambda: Transformer(num_heads=True), "num_heads=True .*positive integer"),
    (lambda: Transformer(num_heads=4, width=12), "heads of size 3, but rotary positions need an even size"),
    (lambda: Transformer(num_heads=4, num_kv_heads=3), "num_kv_heads=3 does not divide num_heads=4"),
    (lambda: Transformer(num_heads=4, width=30), "num_heads=4 does not divide width=30"),
    (lambda: Transformer(rope_base=10**400), "rope_base=10+ must be a positive number"),
    (lambda: Transformer(compute_dtype="float8"), "compute_dtype='float8'; use one of float32, bfloat16"),
    (lambda: Transformer(lora_alpha=32.0), "lora_alpha=32.0 has no effect without adapters"),
    (lambda: Transformer(frozen_dtype="bfloat16"), "set lora_rank, or leave it out"),
    (lambda: Transformer(lora_rank=0), "lora_rank=0"),
    (lambda: chunked(logits_chunk=0), "logits_chunk=0"),
    (lambda: chunked(logits_chunk=8, environment="CartPole-v1", network="mlp"), "for transformers"),
    (lambda: diagonal_gaussian((1.0,), (0.0,)), "low below high"),
    (lambda: make_distribution(Box((0.0,), (1.0,)), "beta"), "unknown action_distribution 'beta': use 'auto'"),
    (lambda: make_distribution(None), "unknown action space None; use Discrete, MultiDiscrete or Box"),
    (lambda: generated([[1.5]]), r"prompts are whole numbers \[N, P\]"),
    (lambda: generated([[1], [1, 2]]), r"prompts are whole numbers \[N, P\]"),
    (lambda: generated([[1], [-1]]), "a prompt has no tokens"),
    (lambda: generated([[7]]), "prompts have the token 7, but the policy 7; use its own"),
    (lambda: generated([[1]], end_token=1.5), "must be one of the"),
    (lambda: generated([[1]], end_token=(0, 7)), "must be one of the"),
    (lambda: add_lora(Transformer(), {}, None), "needs an architecture with adapters"),
    (lambda: add_lora(LORA, {"actor": {"lora_a": None}}, None), "have adapters already"),
    (lambda: merge_lora(LORA, {"actor": {"lora_a": jnp.zeros((3, 2))}}), "adapters of rank 2, but .* lora_rank=4"),
    (lambda: custom(trainable=lambda path: False), "False for every parameter.*network/torso"),
    (lambda: custom(trainable=lambda: True), "trainable fails with TypeError"),
]


def test_what_a_policy_cannot_be_is_refused():
    for refused, message in REFUSED:
        with pytest.raises(ConfigError, match=message):
            refused()

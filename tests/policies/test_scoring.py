"""Log-probabilities in chunks: the same numbers as from whole distributions, in a small part of the memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import NUM_TOKENS, copy_task

from grpo_jax import GRPO, PPO, Config, Hyperparams, make_init, make_train_step, with_reference
from grpo_jax.hyperparams import completed
from grpo_jax.policies import Transformer, make_token_policy
from grpo_jax.policies.distributions import categorical
from grpo_jax.policies.sampling import score, with_temperature

SMALL = {"width": 16, "num_heads": 4, "num_kv_heads": 2, "num_layers": 1}
RUN = {"environment": copy_task(), "network": Transformer(**SMALL), "num_envs": 8, "group_size": 4}
RUN |= {"num_epochs": 2, "num_minibatches": 2}
HYPERPARAMS = Hyperparams(learning_rate=0.03, kl_coef=0.1, entropy_coef=0.05, total_steps=1e9)


@pytest.mark.parametrize("chunk, tied", [(7, True), pytest.param(1000, False, marks=pytest.mark.slow)])
def test_scores_and_gradients_are_those_of_whole_distributions(chunk, tied):
    network, family = Transformer(**SMALL, tie_embeddings=tied), categorical(NUM_TOKENS)
    policy = with_temperature(make_token_policy(network, family, max_steps=5, logits_chunk=chunk), 0.7)
    init = jax.jit(policy.init)
    params = init(jax.random.key(0))
    prompts = jax.random.randint(jax.random.key(1), (3, 4), 0, NUM_TOKENS)
    tokens, actions = jax.random.randint(jax.random.key(2), (2, 5, 3), 0, NUM_TOKENS)
    carry = policy.sequence_carry(jax.jit(policy.initial_carry, static_argnums=1)(params, 3, prompts))
    is_first = jnp.zeros((5, 3), bool)
    weights, inputs = jax.random.normal(jax.random.key(3), (2, 5, 3)), (tokens, carry, is_first)

    def chunked(params):
        return jnp.stack(score(policy, params, policy.features(params, *inputs), actions))

    def whole(params):
        logits, _ = policy.sequence(params, *inputs)
        return jnp.stack([family.log_prob(logits, actions), family.entropy(logits)])

    def scores_and_gradient(scores):
        def total(params):
            found = scores(params)
            return jnp.sum(weights * found), found

        gradient, found = jax.jit(jax.grad(total, has_aux=True))(params)
        return found, gradient

    (found, ours), (expected, gradient) = map(scores_and_gradient, (chunked, whole))
    np.testing.assert_allclose(found, expected, atol=2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), ours, gradient)


@pytest.mark.parametrize(
    ("algorithm", "fields"),
    [
        (with_reference(GRPO), {"truncate_sampling": True}),
        (with_reference(GRPO), {"network": Transformer(**SMALL, lora_rank=2)}),
        (with_reference(GRPO)._replace(critic=PPO.critic), {"network": Transformer(**SMALL, shared_critic=True)}),
    ],
)
@pytest.mark.slow
def test_a_train_step_in_chunks_estimates_the_kl_to_the_behaviour(algorithm, fields):
    """Parameters are the same after two iterations."""
    config, results = Config(**RUN | {"algorithm": algorithm} | fields), []
    hyperparams = completed(HYPERPARAMS, config.hyperparams_class)
    if config.truncate_sampling:
        hyperparams = hyperparams.replace(top_p=0.8, top_k=4.0, min_p=0.1)
    for chunk in (None, 3):
        config = dataclasses.replace(config, logits_chunk=chunk)
        state = jax.jit(make_init(config))(jax.random.key(0), hyperparams)
        step = jax.jit(make_train_step(config))
        results.append(step(step(state)[0]))
    (whole, exact), (chunked, estimated) = results
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), chunked.params, whole.params)
    assert float(exact["policy/entropy"]) == pytest.approx(float(estimated["policy/entropy"]), rel=1e-4)
    assert 0 < float(estimated["policy/kl_behaviour"]) == pytest.approx(float(exact["policy/kl_behaviour"]), rel=1.0)


def test_no_array_of_an_iteration_has_a_row_of_the_vocabulary_for_each_token():
    """At 50,000 words, whole distributions take 600 KiB a token; here each further token takes less than 8 KiB."""
    vocabulary, num_envs = 50_000, 4

    def temporary_bytes(length):
        network = Transformer(width=8, num_heads=2, num_layers=1)
        policy = make_token_policy(network, categorical(vocabulary), max_steps=length, logits_chunk=16)
        params = jax.eval_shape(policy.init, jax.random.key(0))

        def loss(params, prompts, tokens, bits):
            carry = policy.sequence_carry(policy.initial_carry(params, num_envs, prompts))
            scores = score(policy, params, policy.features(params, tokens, carry, None), tokens, bits)
            return jnp.sum(scores.log_prob + scores.entropy)

        prompts, tokens = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((num_envs, 4), (length, num_envs)))
        bits = jax.ShapeDtypeStruct((length, num_envs, vocabulary // 8), jnp.uint8)  # of top-p
        program = jax.jit(jax.grad(loss)).lower(params, prompts, tokens, bits).compile()
        return program.memory_analysis().temp_size_in_bytes

    a_token = (temporary_bytes(128) - temporary_bytes(64)) / (64 * num_envs)
    assert a_token < 8 * 1024

"""The transformer as a policy: cache and padding do not change its outputs, and groups share their prompts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import END, EQUALS, NUM_TOKENS, bits, copy_task
from small import begin, minibatch_gradient

from grpo_jax import GRPO, PPO, Config, Sampling, generate
from grpo_jax.config import behaviour_policy
from grpo_jax.devices.execution_plan import CPU
from grpo_jax.environments import group_parameters
from grpo_jax.groups import FRESH, one_carry_per_group
from grpo_jax.policies import SamplingHyperparams, Transformer, make_token_policy
from grpo_jax.policies.decoder import rope_frequencies
from grpo_jax.policies.distributions import categorical
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.updates.batch import make_batch

SMALL = {"width": 16, "num_heads": 4, "num_kv_heads": 2, "num_layers": 1}
RUN = {"environment": copy_task(), "network": Transformer(**SMALL), "num_envs": 8, "group_size": 4}
RUN |= {"num_epochs": 1, "num_minibatches": 2}


@jax.jit
def lively(params):
    """Larger weights than the initial ones, so that distributions are far from uniform and values far from 0."""
    flat, unravel = jax.flatten_util.ravel_pytree(params)
    return unravel(1.5 * flat + 0.2 * jax.random.normal(jax.random.key(7), flat.shape))


def make(**settings):
    policy = make_token_policy(Transformer(**SMALL | settings), categorical(NUM_TOKENS), max_steps=5)
    return policy, lively(jax.jit(policy.init)(jax.random.key(0)))


PROMPTS = np.array([[3, 1, 4, 1], [-1, -1, 2, 0], [2, 0, -1, -1], [-1, 2, -1, 0], [-1, -1, -1, -1]])
TOKENS = np.random.default_rng(3).integers(0, NUM_TOKENS, (5, 5), np.int32)
TOKENS[:, 1:4] = np.array([[5, 0, 2, 6, 1]]).T


@functools.partial(jax.jit, static_argnums=0)
def both(policy, params):
    """Logits `[S, N, V]`, step by step from the cache and in parallel."""

    def step(carry, tokens):
        logits, _, carry = policy.step(params, tokens, carry)
        return carry, logits

    carry = policy.initial_carry(params, 5, PROMPTS)
    cached = jax.lax.scan(step, carry, TOKENS)[1]
    return cached, policy.sequence(params, TOKENS, policy.sequence_carry(carry), None)[0]


EVERYTHING = {"num_layers": 2, "tie_embeddings": True, "qk_norm": True, "attention_bias": True, "no_rope_interval": 2}


@pytest.fixture(scope="module")
def full():
    return jax.device_get(both(*make(**EVERYTHING)))


def test_neither_the_cache_nor_padding_changes_the_logits(full):
    cached, parallel = full
    assert cached.shape == (5, 5, NUM_TOKENS) and cached.std() > 0.3
    np.testing.assert_allclose(cached, parallel, atol=1e-5)
    # Rows 1 to 3 are the same prompt and completion, with padding on the left, on the right and in between.
    np.testing.assert_allclose(cached[:, 1:4], np.repeat(cached[:, 1:2], 3, axis=1), atol=1e-5)
    assert np.max(np.abs(cached[:, 1] - cached[:, 4])) > 0.1, "the prompt is read"


def test_scaled_frequencies_are_those_of_transformers():
    """Of version 5.24.0: some of Llama 3.2's, below, between and above the bounds, and all of a linear one's."""
    llama = Transformer(head_size=64, rope_base=5e5, rope_scaling=(32.0, 1.0, 4.0, 8192))
    found = rope_frequencies(llama)[jnp.array([0, 8, 14, 16, 18, 20, 31])]
    published = [1, 0.0376060307, 0.00321144611, 0.000429556705, 1.94616387e-05, 8.57025589e-06, 9.41830649e-08]
    np.testing.assert_allclose(found, published, rtol=1e-6)
    found = rope_frequencies(Transformer(head_size=16, rope_scaling=[4.0]))
    np.testing.assert_allclose(found[:4], [0.25, 0.07905694, 0.025, 0.007905695], rtol=1e-6)


def test_half_precision_is_close_and_its_weights_and_logits_are_not_half(full):
    half, params = make(**EVERYTHING, compute_dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    carry = jax.eval_shape(lambda: half.initial_carry(params, 5, PROMPTS))
    assert {leaf.dtype for leaf in jax.tree.leaves(carry.cache)} == {jnp.dtype("bfloat16")}
    cached, parallel = jax.device_get(both(half, params))
    assert cached.dtype == parallel.dtype == jnp.float32
    for logits, exact in zip((cached, parallel), full, strict=True):
        error = np.abs(logits - exact)
        assert 0 < np.max(error) < 0.05 * np.max(np.abs(exact))
        assert np.mean(error) < 0.025  # a logit is rounded on either path, and in another order on each


def rolled_out(config, hyperparams=None, key=1):
    """A train state with `lively` parameters, the policy that acts, and a rollout of it."""
    state = begin(config, hyperparams)
    state = state.replace(params=lively(state.params))
    policy = behaviour_policy(config, state.normalizer, state.hyperparams)
    env_params = group_parameters(config.env, None, config.num_groups, config.group_size)

    @jax.jit
    def play(params, key):
        simulator = Simulator(config.env, policy, params)
        start = simulator.reset(env_params, key, config.num_envs, group_size=config.group_size)
        return simulator.unroll(start, key, num_steps=config.num_steps, auto_reset=False)[1]

    return state, policy, play(state.params, jax.random.key(key))


@pytest.fixture(scope="module")
def rollout():
    """GRPO on the copy task with temperature 0.7 and top-k 4."""
    config = Config(**RUN, truncate_sampling=True)
    return config, *rolled_out(config, SamplingHyperparams(temperature=0.7, top_k=4.0))


@pytest.fixture(scope="module")
def gradient(rollout):
    """`(member, **fields) -> metrics and gradient` of one minibatch of everything, or of one member of each group.

    Given advantages, as the real ones may be 0.
    """
    config, state, policy, trajectory = rollout

    @functools.partial(jax.jit, static_argnames=("share_prompts", "num_minibatches", "num_microbatches"))
    def of(member=None, **fields):
        changed = dataclasses.replace(config, **fields)
        batch = make_batch(changed, policy, state, trajectory, state.hyperparams)
        mask = batch.mask if member is None else batch.mask & (jnp.arange(8) % 4 == member)
        batch = batch.replace(mask=mask, advantage=jnp.where(mask, jnp.arange(8.0) - 2.5, 0.0))
        return minibatch_gradient(changed, policy, state.params, batch, jnp.arange(8), state.hyperparams)[1:]

    return of


def assert_equal_gradients(a, b):
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(a))
    assert largest > 1e-2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * largest, rtol=1e-5), a, b)


def test_the_update_begins_at_ratio_one(rollout, gradient):
    """Rollout and update use the same temperature and mask, and cached log-probabilities equal recomputed ones."""
    config, _, _, trajectory = rollout
    assert config.share_prompts and trajectory.action_mask.sum(-1).max() == 4
    metrics, _ = gradient(share_prompts=False)
    np.testing.assert_allclose(metrics["policy/ratio_max"], 1.0, atol=1e-5)
    assert abs(metrics["policy/kl_behaviour"]) < 1e-6


def test_a_prompt_shared_by_its_group_has_the_same_gradient(rollout, gradient):
    config, _, _, trajectory = rollout
    assert [leaf.shape for leaf in jax.tree.leaves(trajectory.carry)] == [(1, 8, 3)], "the prompt, and no cache"
    shared = one_carry_per_group(trajectory, config.group_size)
    assert [leaf.shape for leaf in jax.tree.leaves(shared.carry)] == [(1, 2, 3)]
    assert_equal_gradients(gradient(share_prompts=False)[1], gradient(share_prompts=True)[1])


@pytest.mark.slow
def test_no_part_with_a_valid_member_is_skipped(gradient):
    whole, parts = (gradient(3, share_prompts=True, num_minibatches=1, num_microbatches=number)[1] for number in (1, 2))
    assert_equal_gradients(whole, parts)


def test_completions_cut_by_length_are_filtered_on_request(rollout, gradient):
    config, state, policy, trajectory = rollout
    cut = trajectory.truncated.any(0)
    assert 0 < cut.sum() < 8

    @functools.partial(jax.jit, static_argnums=0)
    def mask(algorithm):
        changed = dataclasses.replace(config, algorithm=algorithm)
        return make_batch(changed, policy, state, trajectory, state.hyperparams).mask

    assert np.array_equal(mask(GRPO), trajectory.valid)
    assert np.array_equal(mask(GRPO._replace(filter_overlong=True)), trajectory.valid & ~cut)


def test_temperature_divides_the_logits_of_the_policy(rollout):
    config, state, policy, trajectory = rollout
    carry = jax.tree.map(lambda leaf: leaf[0], trajectory.carry)
    logits, _ = jax.jit(config.policy.sequence)(state.params, trajectory.observation, carry, trajectory.is_first)
    logits = np.where(trajectory.action_mask, np.float64(logits) / 0.7, -np.inf)
    taken = np.take_along_axis(logits, np.asarray(trajectory.action)[..., None], -1)[..., 0]
    log_prob = taken - np.log(np.sum(np.exp(logits), axis=-1))
    valid = np.asarray(trajectory.valid)
    np.testing.assert_allclose(log_prob[valid], np.asarray(trajectory.log_prob)[valid], atol=1e-5)


@pytest.mark.slow
def test_a_critic_values_the_last_token_of_a_cut_completion():
    config = Config(**RUN, algorithm=PPO._replace(start=FRESH))
    state, policy, trajectory = rolled_out(config)
    assert set(state.params) == {"actor", "critic"}
    carry = jax.tree.map(lambda leaf: leaf[0], trajectory.carry)
    # A truncated completion is bootstrapped from the value after its last token.
    longer = jnp.concatenate([trajectory.observation, trajectory.action[-1:]])
    _, values = jax.jit(policy.sequence)(state.params, longer, carry, None)
    valid, cut = np.asarray(trajectory.valid), np.flatnonzero(trajectory.truncated[-1])
    assert np.std(values[:-1][valid]) > 0.1 and len(cut)
    np.testing.assert_allclose(trajectory.value[valid], values[:-1][valid], atol=1e-5)
    np.testing.assert_allclose(trajectory.next_value[-1][cut], values[-1][cut], atol=1e-5)


def read(policy, params, text):
    """Logits `[S, V]` after each token of one text."""
    carry = policy.sequence_carry(policy.initial_carry(params, 1))
    padded = np.array(text + [0] * (8 - len(text)))[:, None]
    return np.asarray(jax.jit(policy.sequence)(params, padded, carry, None)[0])[: len(text), 0]


RAGGED = jnp.array([[3, 1, 4], [-1, 2, EQUALS], [2, EQUALS, -1]])


@pytest.mark.slow
def test_generated_log_probs_are_those_of_the_text():
    policy, params = make()
    sampling = Sampling(num_samples=6, end_token=END, temperature=1.5)
    sample = functools.partial(generate, policy, params, RAGGED, sampling=sampling)
    made = jax.jit(sample)(jax.random.key(1))
    stopping = functools.partial(sample, plan=dataclasses.replace(CPU, steps_per_check=1))
    assert bits(jax.jit(stopping)(jax.random.key(1))) == bits(made)
    assert made.tokens.shape == made.log_probs.shape == (3, 6, 5) and made.lengths.shape == (3, 6)
    there = np.arange(5) < np.asarray(made.lengths)[..., None]
    assert np.array_equal(np.asarray(made.tokens) >= 0, there) and (made.log_probs[~there] == 0).all()
    ended = np.any(made.tokens == END, axis=-1)
    assert 0 < ended.sum() < 18 and (made.lengths[~ended] == 5).all()
    assert np.array_equal(np.argmax(made.tokens == END, axis=-1)[ended] + 1, made.lengths[ended])
    # Teacher-forced, each text as one sequence, without a prompt or padding before it.
    for prompt, tokens, log_probs in zip(RAGGED, made.tokens[:, 0], made.log_probs[:, 0], strict=True):
        text, number = [int(token) for token in (*prompt, *tokens) if token >= 0], int((tokens >= 0).sum())
        log_p = jax.nn.log_softmax(read(policy, params, text[:-1]) / 1.5)[-number:]
        np.testing.assert_allclose(log_probs[:number], log_p[jnp.arange(number), text[-number:]], atol=1e-5)


def test_temperature_zero_is_greedy_whatever_the_padding():
    policy, params = make()

    @jax.jit
    def sample(key, **options):
        return generate(policy, params, RAGGED, key, Sampling(num_samples=3, num_steps=4, end_token=END, **options))

    cold = jax.device_get(sample(key=jax.random.key(0), temperature=0.0))
    assert bits(cold.tokens) == bits(sample(key=jax.random.key(1), temperature=0.0).tokens)
    assert bits(cold.tokens[:, :1].repeat(3, 1)) == bits(cold.tokens)
    assert bits(cold.tokens[1]) == bits(cold.tokens[2])
    assert bits(cold.tokens) == bits(sample(key=jax.random.key(2), top_k=1).tokens)
    np.testing.assert_allclose(cold.log_probs, 0.0, atol=1e-6)
    text, made = [3, 1, 4], cold.tokens[0, 0][: cold.lengths[0, 0]].tolist()
    assert made == read(policy, params, text + made)[len(text) - 1 : -1].argmax(axis=-1).tolist()


def test_each_of_several_end_tokens_ends_a_completion():
    policy, params = make()

    def sample(end_token):
        return generate(policy, params, RAGGED, jax.random.key(0), Sampling(num_samples=8, end_token=end_token))

    whole = np.asarray(sample(None).tokens)
    with jax.enable_x64(True):  # in which actions are int64
        assert bits(jax.jit(sample)(2).tokens) == bits(sample(2).tokens)
    for ends in ((2,), np.array([END, 1, 2])):
        tokens = np.asarray(sample(ends).tokens)
        kept = np.cumsum(is_end := np.isin(whole, ends), axis=-1) - is_end == 0
        assert np.array_equal(tokens, np.where(kept, whole, -1)) and not kept.all()


def test_checkpointed_layers_have_the_same_gradient_from_a_quarter_of_the_activations():
    text, gradients, kept = jax.random.randint(jax.random.key(1), (16, 4), 0, 16), [], []
    for checkpoint in (False, True):
        architecture = Transformer(width=16, num_heads=2, num_layers=2, checkpoint_layers=checkpoint)
        policy = make_token_policy(architecture, categorical(16), max_steps=16)

        def loss(params, policy=policy):
            carry = policy.sequence_carry(policy.initial_carry(params, 4, np.zeros((4, 2), np.int32)))
            return jnp.mean(policy.sequence(params, text, carry, None)[0] ** 2)

        params = jax.jit(policy.init)(jax.random.key(0))
        gradients.append(jax.jit(jax.grad(loss))(params))
        backward = jax.eval_shape(lambda params, loss=loss: jax.vjp(loss, params)[1], params)
        kept.append(sum(leaf.size for leaf in jax.tree.leaves(backward)))
        kept[-1] -= sum(leaf.size for leaf in jax.tree.leaves(params))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-7), *gradients)
    assert kept[1] < kept[0] / 4


def test_layers_are_in_a_program_once():
    def lines(num_layers):
        architecture = Transformer(**SMALL | {"num_layers": num_layers, "lora_rank": 2, "checkpoint_layers": True})
        tokens = jnp.zeros((2, 2), jnp.int32)
        policy = make_token_policy(architecture, categorical(9), max_steps=4)

        def play_and_update(params):
            carry = policy.initial_carry(params, 2, tokens)
            last = policy.sequence_carry(carry)
            gradient = jax.grad(lambda params: jnp.sum(policy.sequence(params, tokens, last, None)[0]))(params)
            return policy.step(params, tokens[0], carry)[0], gradient

        params = jax.eval_shape(policy.init, jax.random.key(0))
        return jax.jit(play_and_update).lower(params).as_text().count("\n")

    assert lines(6) - lines(3) < lines(3) / 4

"""Surrogates of whole groups: TPO against NumPy in float64, and minibatches that no group is split over."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import begin, minibatch_gradient, small_config

from grpo_jax.algorithms import TPO
from grpo_jax.errors import ConfigError
from grpo_jax.objectives import TpoHyperparams, target_policy_surrogate
from grpo_jax.rollouts.collect import collect
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.updates.batch import make_batch
from grpo_jax.updates.loss import predict
from grpo_jax.updates.orders import minibatch_order


def softmax(logits, valid=True):
    logits = np.where(valid, np.asarray(logits, float), -1e300)
    weights = np.where(valid, np.exp(logits - logits.max(-1, keepdims=True)), 0)
    return weights / np.maximum(weights.sum(-1, keepdims=True), 1)


@pytest.mark.parametrize("scale, temperature", [(1, 1), (1, 0.3), (30, 0.02), (1e30, 1), (1e-30, 1), (1, 2e-38)])
def test_tpo_is_a_cross_entropy_whose_gradient_is_the_distance_to_the_target(scale, temperature):
    rng = np.random.default_rng(0)
    log_prob, behaviour, advantages = rng.normal(size=(3, 5, 7)) * [[[3]], [[3]], [[scale]]] - [[[20]], [[25]], [[0]]]
    valid = rng.random((5, 7)) < 0.8
    advantages[0], valid[1], valid[2] = 0, False, np.arange(7) == 3  # equals, nobody, and one alone
    inputs = [np.float32(np.where(valid, each, np.nan)) for each in (log_prob, behaviour, advantages)]
    log_prob, behaviour, advantages = map(np.float64, inputs)

    def total(*inputs):
        values = target_policy_surrogate(*inputs, valid, temperature=temperature)
        return values.sum(), values

    with jax.debug_nans(True):
        (gradient, *constants), values = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(*inputs)
    target, policy = softmax(behaviour + advantages / temperature, valid), softmax(log_prob, valid)
    np.testing.assert_allclose(values, np.sum(target * np.log(np.where(valid, policy, 1)), 1), rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(gradient, target - policy, atol=2e-6)
    assert not np.any(constants), "the target is a constant"


def test_the_gradient_vanishes_at_the_target_and_a_group_of_equals_is_pulled_back():
    behaviour, advantages, equal = np.float32([[-3.0, -1.0, -7.0], [1.0, -1.0, 0.0], [0.0, 0.0, 0.0]])
    slope = jax.jit(jax.grad(lambda log_prob, advantages: target_policy_surrogate(log_prob, behaviour, advantages)))
    at_target = behaviour + advantages - np.float32(2.5)  # a constant changes no distribution over members
    np.testing.assert_allclose(slope(at_target, advantages), equal, atol=1e-7)
    for rounded in (behaviour, behaviour * np.float32(1 + 8e-7)):
        assert not np.any(slope(rounded, equal)), "nothing to learn where the policy has not moved"
    np.testing.assert_allclose(slope(at_target, equal), softmax(behaviour) - softmax(at_target), atol=1e-6)
    pair = np.stack([behaviour] * 2)
    unknown = jax.jit(target_policy_surrogate)(pair, pair, np.float32([[np.nan] * 3, equal]))
    assert np.isnan(unknown).tolist() == [True, False], "which skips the update"
    with pytest.raises(ConfigError, match="tpo_temperature=0.0 must be more than 0"):
        TpoHyperparams(tpo_temperature=0.0).check()


SIZES = {"num_envs": 12, "group_size": 3, "env_params": {"max_steps_in_episode": 12}}


def test_the_loss_is_the_mean_over_groups_whatever_its_parts():
    config = small_config(TPO, **SIZES)
    policy = config.policy

    @jax.jit
    def compare(state):
        simulator = Simulator(config.env, policy, state.params, state.hyperparams.discount)
        _, trajectory = collect(config, simulator, state.rollout, *jax.random.split(jax.random.key(1)))
        batch = make_batch(config, policy, state, trajectory, state.hyperparams)

        def whole_loss(params):
            log_prob = predict(policy, params, batch).log_prob
            sums = (jnp.sum(x, axis=0, where=batch.mask) for x in (log_prob, batch.log_prob, batch.advantage))
            log_prob, behaviour, advantage = (x.reshape(4, 3) for x in sums)
            advantage /= batch.mask.sum(axis=0).reshape(4, 3)
            return -jnp.mean(target_policy_surrogate(log_prob, behaviour, advantage, temperature=0.5))

        moved = jax.tree.map(lambda leaf: leaf + 0.2 * jnp.cos(jnp.arange(leaf.size).reshape(leaf.shape)), state.params)
        order = jnp.arange(12).reshape(4, 3)[jnp.array([2, 0, 3, 1])].reshape(-1)
        in_parts = [dataclasses.replace(config, num_microbatches=number) for number in (1, 4)]
        others = [minibatch_gradient(each, policy, moved, batch, order, state.hyperparams) for each in in_parts]
        return batch.mask, jax.value_and_grad(whole_loss)(moved), others

    mask, (expected, slopes), found = compare(begin(config, TpoHyperparams(tpo_temperature=0.5)))
    assert not mask.all() and max(np.abs(leaf).max() for leaf in jax.tree.leaves(slopes)) > 0.01
    for _, metrics, gradient in found:
        np.testing.assert_allclose(metrics["loss/policy"], expected, rtol=1e-5)
        for leaf, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(slopes), strict=True):
            np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=1e-6)


def test_a_minibatch_has_whole_groups_of_each_block():
    config = small_config(TPO, **SIZES | {"num_envs": 24}, num_epochs=3, num_minibatches=2, shuffle_blocks=2)
    orders = np.asarray(minibatch_order(config, jax.random.key(0), jnp.ones((12, 24), bool)))
    groups = orders.reshape(3, 2, 2, -1, 3)
    assert (groups[..., 0] % 3 == 0).all() and (np.diff(groups) == 1).all()
    for block in np.moveaxis(groups[..., 0], 1, 2).reshape(6, -1):
        assert sorted(block) == [0, 3, 6, 9]

"""From trajectories to parameters: what is masked or not finite leaves no trace, and every sample is used."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from probes import FOREVER, Probe, acted, bits, known_params, known_policy, standing

from grpo_jax import GRPO, Config, Hyperparams
from grpo_jax.environments import make_environment
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.updates.batch import make_batch
from grpo_jax.updates.epochs import update_epochs
from grpo_jax.updates.optimizers import make_optimizer
from grpo_jax.updates.schedules import scheduled_rate

probe = make_environment(Probe(), {"bonus": 0.5, "max_steps_in_episode": 4})
LIFETIMES = [1, FOREVER, 2, 3, 2, 1, FOREVER, FOREVER]
GROUP_SIZE = 4
HYPERPARAMS = Hyperparams(learning_rate=0.05, entropy_coef=0.01)
PARAMS = known_params((0.2, 0.0))


@pytest.fixture(scope="module")
def rollout():
    """Eight one-episode members in a window of eight steps: at least half of it is masked."""
    state = standing(probe, known_policy, jax.random.key(0), ages=[0] * 8, lifetimes=LIFETIMES)
    play = functools.partial(Simulator(probe, known_policy, PARAMS).unroll, num_steps=8, auto_reset=False)
    return jax.jit(play)(state, jax.random.key(1))[1]


def config_of(algorithm, **fields):
    return Config(environment=Probe(), algorithm=algorithm, num_envs=8, group_size=GROUP_SIZE, num_steps=8, **fields)


def batch_of(rollout, algorithm):
    return make_batch(config_of(algorithm), known_policy, acted(PARAMS), rollout, HYPERPARAMS)


@functools.partial(jax.jit, static_argnames=("algorithm", "num_minibatches", "num_microbatches"))
def learn(rollout, key, algorithm=GRPO, num_minibatches=4, num_microbatches=2, scale=None):
    """Two epochs; `scale` multiplies the advantages."""
    optimizer = make_optimizer("adam", HYPERPARAMS, scheduled_rate("linear", HYPERPARAMS, 0.0))
    batch = batch_of(rollout, algorithm)
    if scale is not None:
        batch = batch.replace(advantage=batch.advantage * scale.reshape(1, -1))
    config = config_of(algorithm, num_epochs=2, num_minibatches=num_minibatches, num_microbatches=num_microbatches)
    state = acted(PARAMS, opt_state=optimizer.init(ravel_pytree(PARAMS)[0]))
    return update_epochs(config, known_policy, optimizer, state, batch, HYPERPARAMS, key)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_update_that_is_not_finite_is_skipped_and_counted(rollout, value):
    scale = jnp.ones((8, 8)).at[0, 1].set(value)
    learner, metrics = learn(rollout, jax.random.key(0), scale=scale)
    # It is in one of the four minibatches of each of the two epochs.
    assert metrics["optim/skipped_updates"] == 2
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves((learner, metrics)))
    assert learner.opt_state[1][0].count == 6
    assert bits(learner.params) != bits(PARAMS)
    assert learn(rollout, jax.random.key(0), scale=jnp.ones((8, 8)))[1]["optim/skipped_updates"] == 0


def test_updates_that_are_all_skipped_change_nothing_and_have_no_metrics(rollout):
    learner, metrics = learn(rollout, jax.random.key(0), scale=jnp.full((8, 8), jnp.nan))
    assert metrics.pop("optim/skipped_updates") == 8
    assert metrics.pop("policy/ratio_max") == 0
    assert bits(learner.params) == bits(PARAMS)
    assert not any(leaf.any() for leaf in jax.tree.leaves(learner.opt_state))
    assert all(jnp.isnan(value) for value in metrics.values())


def test_an_epoch_uses_every_valid_sample_once(rollout):
    """With plain descent on a loss that is linear in the bias, the order of the samples cannot matter to it."""
    seen = GRPO._replace(
        surrogate=lambda log_ratio, advantage, hyperparams: 0.0 * log_ratio,
        penalties=(lambda prediction, batch, hyperparams: prediction.value * 2.0 ** (batch.observation[..., 0]),),
        critic=lambda values, targets, behaviour_values, hyperparams: 0.0 * values,
        reduce=lambda mask: mask.astype(float),
    )
    batch, optimizer = jax.jit(lambda: batch_of(rollout, seen))(), optax.sgd(1.0)
    start = acted(PARAMS, opt_state=optimizer.init(PARAMS))
    config = config_of(seen, num_epochs=1, num_minibatches=4, num_microbatches=1)
    epoch = jax.jit(lambda key: update_epochs(config, known_policy, optimizer, start, batch, HYPERPARAMS, key)[0])
    for seed in range(4):
        learner = epoch(jax.random.key(seed))
        ages = np.asarray(rollout.observation[..., 0])[np.asarray(rollout.valid)]
        # The bias has the gradient Σ 2^age over a minibatch, which stands for the batch, 4 times as large.
        moved = PARAMS.bias - learner.params.bias
        np.testing.assert_allclose(moved, 4 * np.sum(2.0**ages), rtol=1e-6)

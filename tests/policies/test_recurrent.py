"""Recurrent policies in rollouts, bootstraps and updates; the gradient of a recurrence is that of a plain loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import Probe, check

from grpo_jax import GRPO, Config, Hyperparams
from grpo_jax.algorithms import PPO, with_reference
from grpo_jax.objectives import sequence_ratio
from grpo_jax.policies import MLP
from grpo_jax.policies.recurrent import gru_cell, recurrence
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.training.train_step import initial_state
from grpo_jax.updates.minibatches import default_microbatches

# A gain of 1 for the actor's head, so that the probabilities clearly depend on the carry.
NETWORK = {"network": MLP(recurrent="gru", hidden_sizes=(8,), recurrent_size=4, actor_init_gain=1.0)}


@pytest.fixture(scope="module")
def continued():
    """Two windows of seven steps and episodes of three: the second window begins in the middle of an episode."""
    sizes = {"num_envs": 6, "num_steps": 7, "num_minibatches": 1}
    config = Config(Probe(), with_reference(PPO), **sizes, **NETWORK)

    @jax.jit
    def play(key):
        state = initial_state(config, key, Hyperparams())
        simulator = Simulator(config.env, config.policy, state.params)

        def window(rollout, key):
            return simulator.unroll(rollout, key, num_steps=7, auto_reset=True)

        return state, jax.lax.scan(window, state.rollout, jax.random.split(key))[1]

    # With this key no environment of the second window starts with the initial carry.
    state, trajectories = jax.device_get(play(jax.random.key(1)))
    return config, state, [jax.tree.map(lambda leaf, i=i: leaf[i], trajectories) for i in range(2)]


def test_the_update_sees_what_the_rollout_saw(continued):
    config, state, trajectories = continued
    sequence = jax.jit(config.policy.sequence)
    for trajectory in trajectories:
        carry = jax.tree.map(lambda leaf: leaf[0], trajectory.carry)
        recorded = (trajectory.distribution, trajectory.value)
        seen = sequence(state.params, trajectory.observation, carry, trajectory.is_first)
        for actual, expected in zip(seen, recorded, strict=True):
            np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert not trajectories[1].is_first[0].any()
    initial = config.policy.initial_carry(None, 6)
    first, _ = sequence(state.params, trajectory.observation, initial, trajectory.is_first)
    assert jnp.min(jnp.max(jnp.abs(first[0] - trajectory.distribution[0]), axis=-1)) > 1e-3
    np.testing.assert_allclose(first[2:], trajectory.distribution[2:], atol=1e-5)


def test_bootstraps_use_the_carry_after_the_step(continued):
    config, state, trajectories = continued
    step = jax.jit(config.policy.step)
    for trajectory in trajectories:
        assert trajectory.truncated.any() and not trajectory.terminated.any()
        carry = jax.tree.map(lambda leaf: leaf[0], trajectory.carry)
        for t, (observation, ended) in enumerate(zip(trajectory.observation, trajectory.ended, strict=True)):
            _, value, carry = step(state.params, observation, carry)
            np.testing.assert_allclose(trajectory.value[t], value, atol=1e-5)
            # The next observation of a `Probe` is one step older.
            _, next_value, _ = step(state.params, observation + jnp.array([1.0, 0.0]), carry)
            np.testing.assert_allclose(trajectory.next_value[t], next_value, atol=1e-5)
            carry = jax.tree.map(lambda leaf, ended=ended: jnp.where(ended[:, None], 0.0, leaf), carry)


def test_parts_of_a_minibatch_are_of_whole_sequences():
    for shape, parts in {(1, 4096): 8, (128, 64): 8, (128, 6): 1, (16, 64): 2, (500, 12): 2}.items():
        assert default_microbatches(Config(), *shape) == parts or jax.default_backend() != "cpu"
        assert default_microbatches(Config(algorithm=GRPO._replace(whole_minibatches=True)), *shape) == 1
    check(Config(algorithm=GRPO._replace(ratio=sequence_ratio), network=MLP(recurrent="gru")))


NUM_STEPS, NUM_SEQUENCES, SIZE = 7, 3, 4


def plain(inputs, h, is_first, kernel, bias):
    states = []
    for x, first in zip(inputs, is_first, strict=True):
        h = jnp.where(first[:, None], 0.0, h)
        h = gru_cell(h @ kernel, x, h, bias)
        states.append(h)
    return jnp.stack(states)


def test_states_and_gradients_are_those_of_a_plain_loop():
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (NUM_STEPS, NUM_SEQUENCES, 3 * SIZE), (NUM_SEQUENCES, SIZE), (SIZE, 3 * SIZE), (SIZE,)
    arguments = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    is_first = jnp.zeros((NUM_STEPS, NUM_SEQUENCES), bool).at[0, 1].set(True).at[3, 0].set(True).at[6, 2].set(True)

    def differentiate(run):
        def total(inputs, h, kernel, bias):
            states = run(inputs, h, is_first, kernel, bias)
            return jnp.sum(jnp.sin(states)) + jnp.sum(jnp.cos(2.0 * states[-1])), states

        return jax.jit(jax.value_and_grad(total, (0, 1, 2, 3), has_aux=True))(*arguments)

    oracle = differentiate(plain)
    for steps_per_loop in (1, 3, NUM_STEPS + 2):
        ours = differentiate(functools.partial(recurrence, steps_per_loop))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), ours, oracle)

"""Least squares in place of a critic: exact values of a chain, and a step of training."""

import jax
import numpy as np
from small import small_config

from experiments.without_critic import WITHOUT_CRITIC, least_squares_values
from grpo_jax import Hyperparams, make_init, make_train_step
from grpo_jax.types import Trajectory


def test_values_of_a_chain_are_exact_and_a_step_trains():
    rewards, num_envs, discount = np.float32([1.0, 0.0, 2.0, -1.0, 3.0]), 8, 0.9
    known = np.array([sum(discount**k * r for k, r in enumerate(rewards[s:])) for s in range(5)])
    state = (np.arange(16)[:, None] + np.arange(num_envs)) % 5
    played = Trajectory(**dict.fromkeys(Trajectory._fields))._replace(
        reward=rewards[state],
        terminated=state == 4,
        truncated=np.zeros_like(state, bool),
        valid=np.ones_like(state, bool),
        episode_length=state + 1,
    )
    features, final = np.eye(5, dtype=np.float32)[state], np.eye(5, dtype=np.float32)[(state[-1:] + 1) % 5]
    values, _ = jax.jit(least_squares_values)(features, final, played, discount=discount, trace=0.7)
    np.testing.assert_allclose(values, known[state], rtol=2e-2, atol=2e-2)

    config = small_config(WITHOUT_CRITIC, num_steps=32)
    before = jax.jit(make_init(config))(jax.random.key(0), Hyperparams())
    after, metrics = jax.jit(make_train_step(config))(before)
    assert np.isfinite(metrics["value/explained_variance"]) and metrics["optim/skipped_updates"] == 0
    assert not np.array_equal(*(jax.tree.leaves(each.params)[0] for each in (before, after)))

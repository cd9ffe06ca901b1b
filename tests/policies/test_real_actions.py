"""Real-valued actions, from the environment to the update."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import spaces
from probes import Probe, ProbeParams

from grpo_jax import Config, Hyperparams, run
from grpo_jax.policies import MLP

LOW, HIGH = np.float32([-1.0, 0.0]), np.float32([1.0, 4.0])


class Aim(Probe):
    """One step with reward 1 - squared distance to a target that depends on the mark; NaN outside the bounds."""

    name = "Aim"
    PARAMS = ProbeParams(max_steps_in_episode=1)

    def step_env(self, key, state, action, params):
        observation, state, _, terminated, info = super().step_env(key, state, 0, params)
        target = jnp.stack([1.6 * state.mark - 0.8, 1.0 + state.mark])
        within = jnp.all((action >= LOW) & (action <= HIGH))
        return observation, state, jnp.where(within, 1.0 - jnp.sum((action - target) ** 2), jnp.nan), terminated, info

    def action_space(self, params):
        return spaces.Box(LOW, HIGH, (2,))


SIZES = {"num_envs": 64, "num_steps": 1, "num_epochs": 2, "num_minibatches": 2, "network": MLP((16,))}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_aiming_is_learnt(algorithm):
    config = Config(
        environment=Aim(),
        algorithm=algorithm,
        group_size=8 if algorithm == "grpo" else 1,
        **SIZES,
    )
    rates = jnp.array([0.02, 0.02, 0.0])
    hyperparams = Hyperparams(learning_rate=rates, final_learning_rate=rates, total_steps=100 * 64.0)
    result = run(config, hyperparams, jax.random.split(jax.random.key(0), 3))
    returns = result.metrics["episode/return_mean"]
    assert np.isfinite(returns).all()
    assert (returns[-10:, :2].mean(0) > 0.85).all() and returns[-10:, 2].mean() < 0.4

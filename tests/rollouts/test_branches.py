"""Monte Carlo values: what branches from each state are paid, what they cost, and what cannot be combined with them."""

import jax
import numpy as np
import pytest
from probes import FOREVER, Probe, counted, known_params, known_policy, standing

from grpo_jax import PPO, Config, Hyperparams, make_init, make_train_step
from grpo_jax.algorithms import VINE_PPO
from grpo_jax.environments import make_environment
from grpo_jax.errors import ConfigError
from grpo_jax.policies import MLP
from grpo_jax.rollouts.collect import with_monte_carlo_values
from grpo_jax.rollouts.rollout import Simulator

SMALL = {"environment": Probe(), "num_envs": 4, "group_size": 2, "num_minibatches": 1, "network": MLP((4,))}
NUM_BRANCHES = 3


def test_values_are_those_of_the_rest_of_the_episode():
    """Each step pays 1; episodes terminate at age 2, are cut at age 4, or begin at age 1 and terminate at age 2."""
    env = make_environment(Probe(), {"max_steps_in_episode": 4})

    @jax.jit
    def play(key):
        policy = known_policy._replace(has_critic=False)
        simulator = Simulator(env, policy, known_params((0.0, 0.0)), discount=0.5, keep_states=True)
        start = standing(env, known_policy, key, ages=[0, 0, 1], lifetimes=[2, FOREVER, 2])
        _, trajectory = simulator.unroll(start, key, num_steps=5, auto_reset=False)
        params = start.environment_params
        return with_monte_carlo_values(simulator, params, trajectory, key, num_branches=NUM_BRANCHES)

    trajectory = play(jax.random.key(0))
    left = np.array([[2, 1, 0, 0, 0], [4, 3, 2, 1, 0], [1, 0, 0, 0, 0]]).T
    np.testing.assert_allclose(trajectory.value, 2 - 2.0 ** (1 - left), rtol=1e-6)
    np.testing.assert_allclose(trajectory.next_value[:-1], trajectory.value[1:])
    assert np.array_equal(trajectory.branch_steps, NUM_BRANCHES * left) and trajectory.state is None


@pytest.fixture(scope="module")
def iterate():
    """One iteration of VinePPO, with these hyperparameters."""
    config = Config(algorithm=VINE_PPO._replace(num_branches=NUM_BRANCHES), **SMALL)
    init, step = jax.jit(make_init(config)), jax.jit(make_train_step(config))
    return config, lambda hyperparams: step(init(jax.random.key(0), hyperparams))


def test_steps_of_branches_count(iterate):
    config, one = iterate
    most = config.steps_per_iteration
    assert most == 4 * (3 + NUM_BRANCHES * (3 + 2 + 1))
    state, metrics = one(Hyperparams())
    assert metrics["environment/steps"] == counted(state.steps) == most
    assert metrics["value/explained_variance"] == 1, "the rewards of Probe are known"


def test_branches_are_paid_clipped_rewards(iterate):
    """Every step of Probe pays 1, so that every advantage is 0, and the target of a step 0.25 for each that is left."""
    _, one = iterate
    _, metrics = one(Hyperparams(reward_clip=0.25, discount=1.0, gae_lambda=0.5))
    assert metrics["value/explained_variance"] == 1
    assert metrics["loss/policy"] == 0 and metrics["optim/grad_norm"] == 0
    assert metrics["episode/return_mean"] == 3, "reported returns are never clipped"


def test_what_branches_cannot_value_is_refused():
    for fields, message in (
        ({"algorithm": VINE_PPO._replace(start=PPO.start)}, "one whole episode; use start=FRESH"),
        ({"algorithm": VINE_PPO, "num_steps": 2, "cut_episodes": True}, "without cut_episodes"),
        ({"algorithm": VINE_PPO._replace(critic=PPO.critic)}, "but critic gives other values.*leave out one"),
        ({"algorithm": VINE_PPO, "normalize_rewards": True}, "but normalize_rewards gives"),
        ({"algorithm": VINE_PPO._replace(num_branches=-1)}, "num_branches=-1"),
        # 4 branches from each of 500 steps make up to 4 * 500 * 501 / 2 steps for each environment.
        (
            {"algorithm": VINE_PPO, "environment": "CartPole-v1", "num_envs": 2144},
            "1075216000 .* 1074144000 of them in branches .* counted, 1073741824",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            Config(**SMALL | fields)

"""Whole runs on gymnax environments: what should learn does, and what has nothing to learn from does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.published_cartpole import CONFIG_FIELDS, HYPERPARAM_FIELDS, last_episodes
from grpo_jax import GRPO, Config, Hyperparams, evaluate, run, tuned
from grpo_jax.objectives import episode_scores, group_normalized
from grpo_jax.policies import MLP
from grpo_jax.sweeps.runs import Run

pytestmark = pytest.mark.slow

NUM_SEEDS = 4


def final_returns(config, hyperparams):
    """The mean return of each seed after training, over 128 sampled episodes."""
    keys = jax.random.split(jax.random.key(0), NUM_SEEDS)
    states = run(config, hyperparams, keys).states
    play = jax.jit(jax.vmap(lambda state, key: jnp.mean(evaluate(config, state, key).returns)))
    returns = np.asarray(play(states, jax.random.split(jax.random.key(1), NUM_SEEDS)))
    print(config.environment, "returns by seed:", returns)
    return returns


@pytest.mark.parametrize(
    "config, hyperparams",
    [
        (Config(algorithm="grpo"), Hyperparams()),
        (Config(algorithm="ppo"), Hyperparams(total_steps=80_000.0)),
        tuned("CartPole-v1", "grpo"),
    ],
    ids=["grpo", "ppo", "grpo, tuned"],
)
def test_cartpole_is_solved_with_plain_and_with_tuned_settings(config, hyperparams):
    assert np.min(final_returns(config, hyperparams)) >= 475


def shuffled_advantage(trajectory, hyperparams, group_size):
    """Every rollout gets the advantage of another of its group, drawn anew in each iteration.

    Whole rollouts change places: over steps the mean advantage is positive (longer is better), and handing it to
    whatever action was taken makes any policy deterministic, now and then a good one.
    """
    num_groups = trajectory.reward.shape[1] // group_size
    seed = jax.lax.bitcast_convert_type(jnp.sum(trajectory.log_prob).astype(jnp.float32), jnp.uint32)
    keys = jax.random.split(jax.random.key(seed), num_groups)
    scores = jax.vmap(jax.random.permutation)(keys, episode_scores(trajectory, group_size))
    return jnp.where(trajectory.valid, group_normalized(scores).reshape(1, -1), 0.0)


def test_shuffled_advantages_do_not_learn():
    config = Config(algorithm=GRPO._replace(advantage=shuffled_advantage), num_envs=128, group_size=16)
    assert np.max(final_returns(config, Hyperparams())) < 100


def test_grpo_catches_and_swings_up():
    # A ball falls for 9 steps, whatever gymnax's limit of 1000 says.
    config = Config(environment="Catch-bsuite", env_params={"max_steps_in_episode": 9}, num_envs=128)
    assert np.min(final_returns(config, Hyperparams(total_steps=300_000.0))) >= 0.95
    config = Config(environment="Acrobot-v1", num_envs=128)
    assert np.min(final_returns(config, Hyperparams(total_steps=1_000_000.0))) > -100


def test_gigpo_finds_the_goal_sooner_than_grpo():
    fields = {"num_envs": 64, "num_minibatches": 16, "normalize_observations": True}
    limit, hyperparams = {"max_steps_in_episode": 200}, Hyperparams(total_steps=200_000.0, entropy_coef=0.01)
    configs = (Config("FourRooms-misc", algorithm=name, env_params=limit, **fields) for name in ("grpo", "gigpo"))
    grpo, gigpo = (final_returns(config, hyperparams) for config in configs)
    assert np.mean(gigpo) > np.mean(grpo) + 0.05 and np.mean(gigpo) > 0.9


def test_real_groups_solve_cartpole_within_1000_episodes():
    label = "(c) groups of 10, return-to-go"
    config = Config(environment="CartPole-v1", **CONFIG_FIELDS[label])
    hyperparams = Hyperparams(total_steps=np.inf, max_episodes=1000, **HYPERPARAM_FIELDS[label])
    result = run(config, hyperparams, jax.random.split(jax.random.key(0), 10))
    done = Run(label, config, hyperparams, result, np.zeros(10), 0.0, 0.0)
    assert np.sum(result.metrics["episode/count"], axis=0).tolist() == [1000.0] * 10
    assert np.sum(last_episodes(done, 100) >= 475) >= 8


NEW_NAMES = ("grpo_per_sequence", "gspo_token", "luspo", "lite_ppo", "two_sided_clip", "gigpo", "max_rl", "ipo")
NEW_NAMES += ("dro", "high_entropy", "off_policy_mask")


@pytest.mark.parametrize("name", NEW_NAMES)
def test_each_of_these_algorithms_learns_a_short_cartpole(name):
    sizes = {"num_envs": 64, "group_size": 8, "num_minibatches": 4, "network": MLP((32,))}
    config = Config(environment="CartPole-v1", algorithm=name, env_params={"max_steps_in_episode": 60}, **sizes)
    result = run(config, Hyperparams(total_steps=50_000.0), jax.random.split(jax.random.key(0), 1))
    assert result.metrics["episode/return_mean"][-1, 0] > 35  # about 20 before

"""Mean gradients of anchored and forked groups against their exact expectation in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import minibatch_gradient

from experiments.estimators import per_step
from experiments.harness.tabular import garnet, policy_table
from grpo_jax import Config, Hyperparams, make_init
from grpo_jax.algorithms import RLOO, SAME_STEP_GAE
from grpo_jax.groups import ANCHORED, forked
from grpo_jax.objectives import mean_of_sequence_sums, return_minus_value_advantage, return_to_go_advantage
from grpo_jax.policies import MLP
from grpo_jax.rollouts.collect import collect
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.updates.batch import make_batch

DISCOUNT, TRACE = 0.9, 0.8
HYPERPARAMS = Hyperparams(discount=DISCOUNT, gae_lambda=TRACE)
WINDOW, NUM_ENVS, GROUP_SIZE = 6, 40, 4
NUM_CHAINS, NUM_ROLLOUTS = 64, 60
LIMIT = 60

FORKED = per_step(RLOO._replace(advantage=return_to_go_advantage), forked(3))._replace(reduce=mean_of_sequence_sums)
CASES = {
    "same step, anchored": per_step(SAME_STEP_GAE._replace(advantage=return_minus_value_advantage), ANCHORED),
    "same step + GAE, anchored": per_step(SAME_STEP_GAE, ANCHORED),
    "forked": FORKED,
}


def means(config, params, key):
    """The ascent direction of the logits `[S, A]`, of one chain of rollouts."""
    policy = config.policy
    key, key_init = jax.random.split(key)
    simulator = Simulator(config.env, policy, params, DISCOUNT)

    def rollout(carry, _):
        state, key = carry
        key, *keys = jax.random.split(key, 3)
        state, trajectory = collect(config, simulator, state, *keys)
        batch = make_batch(config, policy, begun, trajectory, HYPERPARAMS)
        everything = jnp.arange(batch.mask.shape[1])
        _, _, gradient = minibatch_gradient(config, policy, params, batch, everything, HYPERPARAMS)
        return (state, key), -gradient["actor"]["Dense_0"]["kernel"]

    begun = make_init(config)(key_init, HYPERPARAMS, params=params)
    carry, _ = jax.lax.scan(rollout, (begun.rollout, key), length=10)
    return jax.lax.scan(rollout, carry, length=NUM_ROLLOUTS)[1].mean(0)


class Chain:
    """A policy in a process, in float64: states follow each other, and episodes too."""

    def __init__(self, process, policy):
        self.policy = policy
        self.onward, rewards, starts = map(np.array, (process.transitions, process.rewards, process.starts))
        ending = 1 - self.onward.sum(-1, keepdims=True)
        self.reward = np.sum(np.concatenate([self.onward, ending], axis=-1) * rewards, axis=-1)  # [S, A]
        self.within = np.einsum("sa,sat->st", policy, self.onward)  # of one episode
        self.across = self.within + (1 - self.within.sum(1))[:, None] * starts
        self.stationary = np.linalg.matrix_power(self.across, 10_000)[0]

    def mean(self, of_actions):
        return np.sum(self.policy * of_actions, axis=-1)

    def score(self, visits, advantage):
        """sum_s visits(s) E[(1{a} - policy(a | s)) advantage(s, a)], `[S, A]`."""
        return visits[:, None] * self.policy * (advantage - self.mean(advantage)[:, None])

    def same_step_values(self, at):
        """`[W + 1, S]`, for all states alike: the mean return-to-go in the window of members that began at a state."""
        returns = [np.zeros(len(self.stationary))]
        for _ in range(WINDOW):
            returns.append(self.mean(self.reward) + DISCOUNT * self.within @ returns[-1])
        begun = np.eye(len(returns[0]))[at]
        means = [begun @ np.linalg.matrix_power(self.across, t) @ returns[WINDOW - t] for t in range(WINDOW + 1)]
        return np.array(means)[:, None]

    def of_windows(self, values, trace):
        """The expectation of GAE's gradient per step; values at time t of a window that begins at a state, by it."""
        total = 0.0
        for at, probability in enumerate(self.stationary):
            value = values(at) + np.zeros((WINDOW + 1, len(self.stationary)))
            later, advantages = np.zeros(len(self.stationary)), []
            for t in reversed(range(WINDOW)):
                following = DISCOUNT * self.onward @ (value[t + 1] + trace * later)
                advantages.append(self.reward + following - value[t][:, None])
                later = self.mean(advantages[-1])
            visits = np.eye(len(self.stationary))[at]
            for advantage in reversed(advantages):
                total = total + probability * self.score(visits, advantage) / WINDOW
                visits = visits @ self.across
        return total

    def of_forks(self):
        """The expectation of the gradient summed over a branch that begins where the trunk is."""
        identity = np.eye(len(self.stationary))
        visits = np.linalg.solve(identity - self.within.T, self.stationary)
        value = np.linalg.solve(identity - DISCOUNT * self.within, self.mean(self.reward))
        return self.score(visits, self.reward + DISCOUNT * self.onward @ value)


def expectation(chain, name):
    """Of the gradient."""
    if name == "forked":
        return chain.of_forks()
    return chain.of_windows(chain.same_step_values, TRACE if "GAE" in name else 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_mean_gradients_are_the_exact_expectation(name):
    """Values by other groups do not depend on a member's own actions, so that the mean over them may be taken first."""
    process, start = garnet(), CASES[name].start
    config = Config(
        environment=process,
        algorithm=CASES[name],
        num_envs=NUM_ENVS,
        group_size=GROUP_SIZE,
        num_steps=WINDOW if start.auto_reset else LIMIT,
        **{"num_minibatches": 1, "num_microbatches": 1, "network": MLP((), actor_init_gain=1.0)},
    )
    params = config.policy.init(jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), NUM_CHAINS)
    gradients = jax.jit(jax.vmap(functools.partial(means, config, params)))(keys)
    chain = Chain(process, np.asarray(policy_table(process, config.policy, params), np.float64))
    expected = expectation(chain, name)
    errors = np.asarray(gradients, np.float64) - expected
    z = errors.mean(0) / (errors.std(0, ddof=1) / np.sqrt(NUM_CHAINS))
    assert np.abs(z).max() < 4
    assert np.linalg.norm(errors.mean(0)) < 0.04 * np.linalg.norm(expected)

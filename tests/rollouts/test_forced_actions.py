"""Actions that the environment itself takes: they are part of the episode, and no update depends on them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import FOREVER, Probe, acted, bits, check, known_params, known_policy, standing
from small import minibatch_gradient

from grpo_jax import Config, Hyperparams
from grpo_jax.algorithms import GSPO, RLOO, with_reference
from grpo_jax.environments import group_parameters, make_environment
from grpo_jax.environments.spaces import Box
from grpo_jax.errors import ConfigError
from grpo_jax.objectives import kl_penalized_reward
from grpo_jax.policies import MLP
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.updates.batch import make_batch


class Insisting(Probe):
    """At ages 1 and 2 the environment takes action 1, which is never legal for the policy. Only that pays."""

    def forced_action(self, state, params):
        return jnp.where((state.time == 1) | (state.time == 2), 1, -1)

    def action_mask(self, state, params):
        return jnp.array([True, False])


env = make_environment(Insisting(), {"max_steps_in_episode": 5, "bonus": 1.0})


@pytest.mark.parametrize("options", [{}, {"greedy": True}])
def test_the_environment_acts_instead_of_the_policy(options):
    start = standing(env, known_policy, jax.random.key(0), ages=[0, 0, 1], lifetimes=[FOREVER, 2, FOREVER])

    @jax.jit
    def play(start):
        simulator = Simulator(env, known_policy, known_params((0.0, 0.5)))
        return simulator.unroll(start, jax.random.key(1), num_steps=5, auto_reset=False, **options)

    end, trajectory = jax.device_get(play(start))
    forced = np.array([[0, 1, 1, 0, 0], [0, 1, 1, 1, 1], [1, 1, 0, 0, 0]], bool).T
    valid = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]], bool).T
    assert trajectory.forced[valid].tolist() == forced[valid].tolist()
    assert trajectory.action[valid].tolist() == forced[valid].astype(int).tolist()
    assert trajectory.acted.tolist() == (valid & ~forced).tolist()
    assert end.episode_return.tolist() == [5 + 2, 2 + 1, 1 + 4 + 2]
    # The policy's log-probability of the environment's action is finite: no action is masked there.
    assert np.isfinite(trajectory.log_prob).all()
    assert trajectory.action_mask[valid].all(axis=1).tolist() == forced[valid].tolist()


ALGORITHMS = {"steps": with_reference(RLOO), "sequences": with_reference(GSPO)._replace(reward=kl_penalized_reward)}


@pytest.mark.parametrize("name", ["steps", pytest.param("sequences", marks=pytest.mark.slow)])
def test_no_gradient_or_metric_depends_on_forced_actions(name):
    free = env._replace(action_mask=None)  # else the policy has one action and no gradient
    config = Config(free, ALGORITHMS[name], num_envs=4, group_size=2, num_minibatches=1, network=MLP((4,)))
    hyperparams = Hyperparams(kl_coef=0.3, entropy_coef=0.1)

    @jax.jit
    def gradient(key, other):
        params, reference = (config.policy.init(jax.random.fold_in(key, i)) for i in range(2))
        simulator = Simulator(config.env, config.policy, params)
        start = simulator.reset(group_parameters(config.env, None, 2, 2), key, 4, group_size=2)
        _, trajectory = simulator.unroll(start, key, num_steps=5, auto_reset=False)
        forced = trajectory.forced
        trajectory = trajectory._replace(
            reward=jax.random.normal(key, forced.shape),
            action=jnp.where(other & forced, 0, trajectory.action),
            log_prob=jnp.where(other & forced, -9.0, trajectory.log_prob),
            distribution=jnp.where((other & forced)[..., None], 7.0, trajectory.distribution),
        )
        state = acted(params, reference_params=reference)
        batch = make_batch(config, config.policy, state, trajectory, hyperparams)
        moved = jax.tree.map(lambda leaf: leaf + 0.1, params)
        indices = jnp.arange(batch.mask.shape[1])
        return minibatch_gradient(config, config.policy, moved, batch, indices, hyperparams), batch

    key = jax.random.key(0)
    (results, batch), (others, _) = gradient(key, jnp.array(False)), gradient(key, jnp.array(True))
    assert bits(results) == bits(others)
    assert any(leaf.any() for leaf in jax.tree.leaves(results[2]))
    assert batch.mask.sum() == 4 * 3 and not batch.weight[~batch.mask].any()
    assert (batch.advantage[~batch.mask] != 0).all()  # they flow on over these steps


def test_what_an_environment_cannot_force_is_an_error():
    for changes, message in (
        ({"forced_action": lambda state, params: state.mark}, r"gives float32\[\]; return an int32 scalar"),
        ({"action_space": Box((0.0,), (1.0,)), "action_mask": None}, "use Discrete actions"),
    ):
        with pytest.raises(ConfigError, match=message):
            check(Config(environment=env._replace(**changes), num_envs=4, group_size=2, num_minibatches=1))

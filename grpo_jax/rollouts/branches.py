"""Monte Carlo values of states: the mean return of branches, rollouts from a state that only serve to value it."""

import math

import jax
import jax.numpy as jnp

from grpo_jax.groups import copy_to_members
from grpo_jax.objectives.returns import discounted_returns
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.types import PyTree, RolloutState, Trajectory


def monte_carlo_values(
    simulator: Simulator,
    state: RolloutState,
    key: jax.Array,
    *,
    num_branches: int,
    num_steps: int,
    reward_clip: jax.Array | float = math.inf,
) -> tuple[jax.Array, jax.Array]:
    """Values of states from rollouts that start at them, without a critic.

        V(s) = mean over branches of sum_t discount^t clip(r_t, -reward_clip, reward_clip)

    Unbiased, except for rewards after `num_steps` (VinePPO, https://arxiv.org/abs/2410.01679). The cost is
    up to `num_branches * num_steps` environment steps for each state.

    Args:
      simulator: the policy, the environment and the discount.
      state: the states of `B` environments.
      key: of all randomness.
      num_branches: number of rollouts from each state.
      num_steps: the most steps of a branch, which ends with its episode.
      reward_clip: largest magnitude of a reward.

    Returns:
      Values `[B]`, in the units of the rewards, and the steps that the branches of each state made, int32 `[B]`.
    """
    branches = copy_to_members(state, num_branches)
    _, trajectory = simulator.unroll(branches, key, num_steps=num_steps, auto_reset=False)
    rewards = jnp.clip(trajectory.reward, -reward_clip, reward_clip)
    returns = discounted_returns(rewards, trajectory.ended, discount=simulator.discount)[0]
    lengths = jnp.sum(trajectory.valid, axis=0, dtype=jnp.int32)
    return jnp.mean(returns.reshape(-1, num_branches), axis=1), jnp.sum(lengths.reshape(-1, num_branches), axis=1)


def with_monte_carlo_values(
    simulator: Simulator,
    environment_params: PyTree,
    trajectory: Trajectory,
    key: jax.Array,
    *,
    num_branches: int,
    reward_clip: jax.Array | float = math.inf,
) -> Trajectory:
    """Adds the Monte Carlo value of every state of rollouts of one episode each, and the steps of its branches.

    A loop over the steps plays the branches of all environments at once. After the end of an episode values are 0, also
    where a limit cut it, since branches end there too.

    Args:
      simulator: the one that played the trajectory.
      environment_params: of its environments, each leaf `[B, ...]`.
      trajectory: `[T, B]`, whole episodes, with the states before each step.
      key: of all randomness.
      num_branches: number of rollouts from each state.
      reward_clip: largest magnitude of a reward in the values; the trajectory's rewards are not clipped.

    Returns:
      The trajectory with `value`, `next_value` and `branch_steps`, without the states.
    """
    num_steps = trajectory.reward.shape[0]
    limits = {"num_branches": num_branches, "num_steps": num_steps, "reward_clip": reward_clip}

    def of_step(now):
        state, valid, key = now
        numbers = monte_carlo_values(simulator, state._replace(environment_params=environment_params), key, **limits)
        return jax.tree.map(lambda x: jnp.where(valid, x, 0), numbers)

    keys = jax.random.split(key, num_steps)
    value, branch_steps = jax.lax.map(of_step, (trajectory.state, trajectory.valid, keys))
    following = jnp.concatenate([value[1:], jnp.zeros_like(value[:1])])
    return trajectory._replace(state=None, value=value, next_value=following, branch_steps=branch_steps)

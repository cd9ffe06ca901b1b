"""The experience of one iteration: windows of a rollout, one after the other, each with new groups."""

import math

import jax
import jax.numpy as jnp

from grpo_jax.config import Config
from grpo_jax.devices.mesh import along_envs
from grpo_jax.groups import copy_to_members, first_members
from grpo_jax.objectives.returns import discounted_returns
from grpo_jax.objectives.slots import episode_scores
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.types import PyTree, RolloutState, Trajectory


def collect(
    config: Config,
    simulator: Simulator,
    state: RolloutState,
    key_start: jax.Array,
    key_rollout: jax.Array,
    reward_clip: jax.Array | float = math.inf,
) -> tuple[RolloutState, Trajectory]:
    """Plays windows of `window_steps`, each of which starts its groups anew, until `num_steps` are made.

    Args:
      config: the number of environments, and the start of the algorithm's groups.
      simulator: the policy in its environment.
      state: the state kept from the last rollout.
      key_start, key_rollout: of the starts of groups, and of the steps.
      reward_clip: largest magnitude of a reward in the values that branches give; no other reward is clipped here.

    Returns:
      The state to keep for the next rollout, and the windows side by side, as if they were environments: `[T, B]`
      with `T = window_steps` and `B = num_windows * num_envs`.
    """
    algorithm, start = config.algorithm, config.algorithm.start
    num_branches = algorithm.num_branches
    if num_branches:
        key_rollout, key_branches = jax.random.split(key_rollout)
    window_simulator = simulator._replace(
        keep_final=algorithm.baseline is not None,
        keep_states=num_branches > 0,
    )

    def window(state, keys):
        key_start, key_rollout = keys
        first = start.begin(simulator, state, key_start, config.group_size)
        last, trajectory = window_simulator.unroll(
            along_envs(first, axis=0),
            key_rollout,
            num_steps=config.window_steps,
            auto_reset=start.auto_reset,
            from_reset=start.from_reset,
            greedy=algorithm.greedy_member and first_members(config.num_envs, config.group_size),
        )
        if num_branches:
            trajectory = with_monte_carlo_values(
                *(simulator, first.environment_params, trajectory, key_branches),
                num_branches=num_branches,
                reward_clip=reward_clip,
            )
        return start.keep(first, last), along_envs(trajectory, axis=1)

    if config.num_windows == 1:
        return window(state, (key_start, key_rollout))
    keys = tuple(jax.random.split(key, config.num_windows) for key in (key_start, key_rollout))
    state, windows = jax.lax.scan(window, state, keys)
    return state, jax.tree.map(_side_by_side, windows)


def _side_by_side(leaf: jax.Array) -> jax.Array:
    """`[W, T, B, ...]` to `[T, W * B, ...]`."""
    leaf = jnp.moveaxis(leaf, 0, 1)
    return leaf.reshape(leaf.shape[0], -1, *leaf.shape[3:])


def kept_groups(config: Config, trajectory: Trajectory) -> Trajectory:
    """The groups to train on: all, or the `num_kept_groups` whose members' returns differ most.

    DAPO's dynamic sampling (https://arxiv.org/abs/2503.14476), which samples until enough groups have some variance, in
    the fixed shapes of one compiled program. Groups with a score that is not finite come last.

    A member that diverged is left out of its group, from the first step of the window: nobody knows its return. Without
    groups the steps before are kept, as values bootstrap them.
    """
    if trajectory.diverged is not None and config.algorithm.start.grouped:
        trajectory = trajectory._replace(valid=trajectory.valid & ~jnp.any(trajectory.diverged, axis=0))
    if config.num_kept_groups is None:
        return trajectory
    scores = episode_scores(trajectory, config.group_size)
    spread = jnp.std(scores - scores[:, :1], axis=1)  # less the first, so that it is exactly 0 for equal scores
    _, kept = jax.lax.top_k(jnp.where(jnp.isfinite(spread), spread, -1.0), config.num_kept_groups)
    members = (kept[:, None] * config.group_size + jnp.arange(config.group_size)[None]).reshape(-1)
    return jax.tree.map(lambda leaf: leaf[:, members], trajectory)


# --- branches --------------------------------------------------------------------------------------------------------


def with_monte_carlo_values(
    simulator: Simulator,
    environment_params: PyTree,
    trajectory: Trajectory,
    key: jax.Array,
    *,
    num_branches: int,
    reward_clip: jax.Array | float = math.inf,
) -> Trajectory:
    """The trajectory with values from branches, rollouts that start at its states and serve only to value them.

        V(s) = mean over branches of sum_t discount^t clip(r_t, -reward_clip, reward_clip)

    Unbiased, as episodes are whole (VinePPO, https://arxiv.org/abs/2410.01679). The cost is up to `num_branches * T`
    environment steps for each state. A loop over the steps plays the branches of all environments at once. After the
    end of an episode values are 0, also where a limit cut it, since branches end there too.

    Args:
      simulator: the policy, the environment and the discount.
      environment_params: each leaf `[B, ...]`.
      trajectory: `[T, B]`, with the states before each step, which are left out of the result.
      key: of all randomness.
      num_branches: number of rollouts from each state.
      reward_clip: largest magnitude of a reward.
    """
    num_steps = trajectory.reward.shape[0]

    def of_step(xs):
        state, valid, key = xs
        branches = copy_to_members(state._replace(environment_params=environment_params), num_branches)
        _, played = simulator.unroll(branches, key, num_steps=num_steps, auto_reset=False)
        rewards = jnp.clip(played.reward, -reward_clip, reward_clip)
        returns = discounted_returns(rewards, played.ended, discount=simulator.discount)[0]
        lengths = jnp.sum(played.valid, axis=0, dtype=jnp.int32)
        value = jnp.mean(returns.reshape(-1, num_branches), axis=1)
        steps = jnp.sum(lengths.reshape(-1, num_branches), axis=1)
        return jnp.where(valid, value, 0), jnp.where(valid, steps, 0)

    keys = jax.random.split(key, num_steps)
    value, branch_steps = jax.lax.map(of_step, (trajectory.state, trajectory.valid, keys))
    next_value = jnp.concatenate([value[1:], jnp.zeros_like(value[:1])])
    return trajectory._replace(state=None, value=value, next_value=next_value, branch_steps=branch_steps)

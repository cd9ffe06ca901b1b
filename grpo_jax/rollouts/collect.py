"""The experience of one iteration: windows of a rollout, one after the other, each with new groups."""

import math

import jax
import jax.numpy as jnp

from grpo_jax.config import Config
from grpo_jax.devices.mesh import along_envs
from grpo_jax.groups import first_members
from grpo_jax.objectives.slots import episode_scores
from grpo_jax.rollouts.branches import with_monte_carlo_values
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.types import RolloutState, Trajectory


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
    start = config.algorithm.start
    greedy = config.algorithm.greedy_member and first_members(config.num_envs, config.group_size)
    first_action = jnp.arange(config.num_envs) % config.group_size if start.all_actions else None
    num_branches = config.algorithm.num_branches
    if num_branches:
        key_rollout, key_branches = jax.random.split(key_rollout)

    def window(state, keys):
        key_start, key_rollout = keys
        begun = start.begin(simulator, state, key_start, config.group_size)
        ended, trajectory = simulator.unroll(
            along_envs(begun, axis=0),
            key_rollout,
            num_steps=config.window_steps,
            auto_reset=start.auto_reset,
            from_reset=start.from_reset,
            greedy=greedy,
            first_action=first_action,
            num_sharing=config.group_size if config.common_random_numbers else 1,
            keep_final=config.algorithm.baseline is not None,
            keep_states=num_branches > 0,
        )
        if num_branches:
            trajectory = with_monte_carlo_values(
                *(simulator, begun.environment_params, trajectory, key_branches),
                num_branches=num_branches,
                reward_clip=reward_clip,
            )
        return start.keep(begun, ended), along_envs(trajectory, axis=1)

    if config.num_windows == 1:
        return window(state, (key_start, key_rollout))
    keys = (jax.random.split(key, config.num_windows) for key in (key_start, key_rollout))
    state, windows = jax.lax.scan(window, state, tuple(keys))
    return state, jax.tree.map(_side_by_side, windows)


def _side_by_side(leaf: jax.Array) -> jax.Array:
    """`[W, T, B, ...]` to `[T, W * B, ...]`."""
    leaf = jnp.moveaxis(leaf, 0, 1)
    return leaf.reshape(leaf.shape[0], -1, *leaf.shape[3:])


def kept_groups(config: Config, trajectory: Trajectory) -> Trajectory:
    """The groups to train on: all, or those whose members' returns differ most."""
    if config.num_kept_groups is None:
        return trajectory
    return most_varied_groups(trajectory, config.group_size, config.num_kept_groups)


def most_varied_groups(trajectory: Trajectory, group_size: int, num_kept: int) -> Trajectory:
    """The `num_kept` groups whose members' returns differ most.

    DAPO's dynamic sampling (https://arxiv.org/abs/2503.14476), which samples until enough groups have some variance, in
    the fixed shapes of one compiled program. Groups with a score that is not finite come last.
    """
    scores = episode_scores(trajectory, group_size)
    spread = jnp.std(scores - scores[:, :1], axis=1)  # less the first, so that it is exactly 0 for equal scores
    _, kept = jax.lax.top_k(jnp.where(jnp.isfinite(spread), spread, -1.0), num_kept)
    members = (kept[:, None] * group_size + jnp.arange(group_size)[None]).reshape(-1)
    return jax.tree.map(lambda leaf: leaf[:, members], trajectory)

"""The experience of one iteration: windows of a rollout, one after the other, each with new groups."""

import jax
import jax.numpy as jnp

from grpo_jax.config import Config
from grpo_jax.devices.mesh import along_envs
from grpo_jax.groups import first_members
from grpo_jax.objectives.slots import episode_scores
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.types import RolloutState, Trajectory


def collect(
    config: Config,
    simulator: Simulator,
    state: RolloutState,
    key_start: jax.Array,
    key_rollout: jax.Array,
) -> tuple[RolloutState, Trajectory]:
    """Plays windows of `window_steps`, each of which starts its groups anew, until `num_steps` are made.

    Args:
      config: the number of environments, and the start of the algorithm's groups.
      simulator: the policy in its environment.
      state: the state kept from the last rollout.
      key_start, key_rollout: of the starts of groups, and of the steps.

    Returns:
      The state to keep for the next rollout, and the windows side by side, as if they were environments: `[T, B]`
      with `T = window_steps` and `B = num_windows * num_envs`.
    """
    algorithm, start = config.algorithm, config.algorithm.start
    window_simulator = simulator._replace(keep_final=algorithm.baseline is not None)

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

"""What can fill the slot `baseline` of an `Algorithm`: the functions of `baselines`, bound to trajectories."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.hyperparams import Hyperparams
from grpo_jax.objectives import baselines
from grpo_jax.types import PyTree, Trajectory


def same_step_baseline(
    trajectory: Trajectory, policy: Any, params: PyTree, hyperparams: Hyperparams, group_size: int
) -> tuple[jax.Array, jax.Array]:
    """The mean return-to-go of the group's others at the same step.

    With a critic, returns are bootstrapped by it where a limit or the window cut them; otherwise they end there.
    """
    returns, final_value = _window_returns(trajectory, hyperparams)
    return baselines.same_step_leave_one_out(returns, trajectory.valid, group_size), final_value


def state_hash_baseline(
    trajectory: Trajectory, policy: Any, params: PyTree, hyperparams: Hyperparams, group_size: int
) -> tuple[jax.Array, jax.Array]:
    """The mean return-to-go of other environments' visits to the same state, or else of the group at the same step.

    With a critic, it values final states; otherwise visits to them do.
    """
    returns, critic_value = _window_returns(trajectory, hyperparams)
    value, final_value = baselines.state_hash_values(
        trajectory.observation,
        trajectory.final_observation,
        returns,
        trajectory.valid,
        fallback=baselines.same_step_leave_one_out(returns, trajectory.valid, group_size),
    )
    return value, final_value if trajectory.final_value is None else critic_value


def observed(trajectory: Trajectory, policy: Any, params: PyTree) -> tuple[jax.Array, jax.Array]:
    """States are compared by what is observed of them."""
    return trajectory.observation, trajectory.final_observation


def policy_features(trajectory: Trajectory, policy: Any, params: PyTree) -> tuple[jax.Array, jax.Array]:
    """States are compared by what the actor's head reads."""
    if policy.features is None:
        raise ValueError("policy_features are not told by this policy, a transformer; compare what is observed")
    carry = jax.tree.map(lambda leaf: leaf[0], trajectory.carry)
    begins = jnp.zeros((1, trajectory.valid.shape[1]), bool)
    of_final = jax.vmap(lambda observation, carry: policy.features(params, observation[None], carry, begins)[0])
    return (
        policy.features(params, trajectory.observation, carry, trajectory.is_first),
        of_final(trajectory.final_observation, trajectory.final_carry),
    )


def kernel_baseline(
    trajectory: Trajectory,
    policy: Any,
    params: PyTree,
    hyperparams: Hyperparams,
    group_size: int,
    *,
    metric: Callable = observed,
    standardize: bool = False,
    relative: bool = True,
    reach: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """The mean return-to-go of all other environments at the same step, weighted by similarity.

    Options by `functools.partial`: the metric, `observed` or `policy_features`; the others are those of
    `baselines.kernel_values`. The bandwidth is `kernel_bandwidth`.
    """
    if trajectory.valid.shape[1] < 2:
        raise ValueError("kernel_baseline compares environments, and there is one; use num_envs=2 or more, best 64")
    return baselines.kernel_values(
        *metric(trajectory, policy, params),
        trajectory.reward,
        trajectory.terminated,
        trajectory.truncated,
        trajectory.valid,
        discount=hyperparams.discount,
        bandwidth=hyperparams.kernel_bandwidth,
        standardize=standardize,
        relative=relative,
        reach=reach,
    )


def _window_returns(trajectory: Trajectory, hyperparams: Hyperparams) -> tuple[jax.Array, jax.Array]:
    """Discounted returns-to-go `[T, B]`, and the final values that continue them, `[F, B]`: 0 without a critic."""
    final_value = trajectory.final_value
    if final_value is None:
        final_value = jnp.zeros(trajectory.final_observation.shape[:2])
    returns = baselines.bootstrapped_returns(
        trajectory.reward, final_value, trajectory.terminated, trajectory.truncated, discount=hyperparams.discount
    )
    return returns, final_value

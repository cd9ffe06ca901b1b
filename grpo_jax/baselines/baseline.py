"""The simplest baseline: the mean return of the group at the same step."""

from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.hyperparams import Hyperparams
from grpo_jax.objectives.advantages import same_step_leave_one_out
from grpo_jax.objectives.returns import bootstrapped_returns
from grpo_jax.observations import leading_shape
from grpo_jax.types import PyTree, Trajectory


def same_step_baseline(
    trajectory: Trajectory, policy: Any, params: PyTree, hyperparams: Hyperparams, group_size: int
) -> tuple[jax.Array, jax.Array]:
    """The mean return-to-go of the group's others at the same step.

    With a critic, returns are bootstrapped by it where a limit or the window cut them; otherwise they end there.
    """
    final_value = trajectory.final_value
    if final_value is None:
        final_value = jnp.zeros(leading_shape(trajectory.final_observation, 2))
    returns = bootstrapped_returns(
        trajectory.reward, final_value, trajectory.terminated, trajectory.truncated, discount=hyperparams.discount
    )
    return same_step_leave_one_out(returns, trajectory.valid, group_size), final_value

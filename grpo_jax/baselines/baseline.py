"""What a baseline is, how a function becomes one, and the simplest: the mean return of the group at the same step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.hyperparams import Hyperparams
from grpo_jax.objectives.advantages import same_step_leave_one_out
from grpo_jax.objectives.returns import bootstrapped_returns
from grpo_jax.observations import leading_shape
from grpo_jax.types import PyTree, Trajectory


class Baseline(NamedTuple):
    """Values of states, estimated from the returns of other rollouts: two pure functions, as in optax.

    The state is what the baseline keeps from rollout to rollout, a pytree of arrays of constant shapes and dtypes.
    """

    # (trajectory, policy, params) -> the state before the first rollout; of the trajectory only shapes and dtypes exist
    init: Callable
    # (trajectory, state, policy, params, hyperparams, group_size) -> values [T, B] of the observations, [F, B] of the
    # final ones, and the next state; `params` are those that acted
    apply: Callable


def no_state(trajectory: Trajectory, policy: Any, params: PyTree) -> tuple[()]:
    """`init` of a baseline without a state."""
    return ()


class _Stateless(NamedTuple):
    """`apply` of a baseline without a state; equal for equal functions, as a hashable `Config` needs."""

    values: Callable

    def __call__(self, trajectory: Trajectory, state: PyTree, *others: Any) -> tuple:
        return *self.values(trajectory, *others), state


def stateless(values: Callable) -> Baseline:
    """A baseline that keeps nothing from rollout to rollout.

    Args:
      values: `(trajectory, policy, params, hyperparams, group_size) -> values [T, B], final values [F, B]`.
    """
    return Baseline(no_state, _Stateless(values))


def same_step_baseline() -> Baseline:
    """The mean return-to-go of the group's others at the same step.

    With a critic, returns are bootstrapped by it where a limit or the window cut them; otherwise they end there.
    """
    return stateless(_same_step)


def _same_step(trajectory, policy, params, hyperparams, group_size):
    returns, final_value = window_returns(trajectory, hyperparams)
    return same_step_leave_one_out(returns, trajectory.valid, group_size), final_value


def window_returns(trajectory: Trajectory, hyperparams: Hyperparams) -> tuple[jax.Array, jax.Array]:
    """Discounted returns-to-go `[T, B]`, and the final values that continue them, `[F, B]`: 0 without a critic."""
    final_value = trajectory.final_value
    if final_value is None:
        final_value = jnp.zeros(leading_shape(trajectory.final_observation, 2))
    returns = bootstrapped_returns(
        trajectory.reward, final_value, trajectory.terminated, trajectory.truncated, discount=hyperparams.discount
    )
    return returns, final_value

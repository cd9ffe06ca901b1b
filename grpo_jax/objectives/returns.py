"""Returns-to-go, and advantages relative to the values of states."""

import functools

import chex
import jax
import jax.numpy as jnp

from grpo_jax.hyperparams import Hyperparams
from grpo_jax.objectives.advantages import same_step_leave_one_out
from grpo_jax.objectives.slots import score_sizes
from grpo_jax.precision import above_rounding, at_least_float32, nan_where
from grpo_jax.types import Trajectory

__all__ = ["bootstrapped_returns", "discounted_returns", "gae", "gae_advantage", "next_values"]
__all__ += ["return_minus_value_advantage", "return_to_go_advantage", "returns_to_go"]


def gae(
    rewards: jax.Array,
    values: jax.Array,
    next_values: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    *,
    discount: float,
    gae_lambda: float,
) -> jax.Array:
    """Generalised advantage estimation, with termination and truncation kept apart.

        delta_t = r_t + discount (1 - terminated_t) V(s'_t) - V(s_t)
        A_t = delta_t + discount lambda (1 - terminated_t)(1 - truncated_t) A_{t+1}

    https://arxiv.org/abs/1506.02438. Termination stops the bootstrap; truncation does not, but both end the trace.
    Targets for the values are `A + V`.

    Args:
      rewards: `[T, ...]`.
      values: `[T, ...]`, of the observation before the step.
      next_values: `[T, ...]`, of the true observation after the step: at the end of an episode its final one, never
        the first one of the next episode. Ignored where terminated.
      terminated: `[T, ...]`, true where the task ended the episode.
      truncated: `[T, ...]`, true where a limit cut it.
      discount: in [0, 1].
      gae_lambda: in [0, 1]; 0 is the one-step error, 1 is return minus value.

    Returns:
      `[T, ...]`, in the units of the values.
    """
    if values is None:
        raise ValueError(
            "the advantage is relative to the values of a critic or of a baseline, and the algorithm has neither; set "
            "critic=PPO.critic or baseline=kernel_baseline, or use an advantage without, such as "
            "return_to_go_advantage"
        )
    chex.assert_equal_shape([rewards, values, next_values, terminated, truncated])
    rewards, values, next_values = map(at_least_float32, (rewards, values, next_values))
    terminated, ended = terminated.astype(bool), jnp.logical_or(terminated, truncated)
    # delta_t = r_t + discount (1 - terminated_t) V(s'_t) - V(s_t); a value beyond the end may be NaN, so no product
    deltas = rewards + discount * jnp.where(terminated, 0.0, next_values) - values
    # A_t = delta_t + discount lambda (1 - ended_t) A_{t+1}
    return _accumulate(deltas, ended, discount * gae_lambda)


def next_values(values: jax.Array, final_values: jax.Array, truncated: jax.Array) -> jax.Array:
    """Values of the true next observations, for `gae`: at a truncation the value of the episode's final observation.

    Args:
      values: `[T, N]`, of the observation before each step.
      final_values: `[F, N]`, of observations that no step starts from: the final one of each truncated episode, in
        order, then the one after the window. `F` is 1 where no episode follows another: the next step then starts
        from the final observation.
      truncated: `[T, N]` bool.

    Returns:
      `[T, N]`; NaN at truncations for which there is no final value.
    """
    values, final_values = at_least_float32(values), at_least_float32(final_values)
    following = jnp.concatenate([values[1:], final_values[-1:]])  # V(s'_t) = V(s_{t+1}), but for truncations
    if len(final_values) == 1:
        return following
    num_before = jnp.cumsum(truncated, axis=0) - jnp.asarray(truncated, int)
    for number, final_value in enumerate(final_values[:-1]):
        following = jnp.where(truncated & (num_before == number), final_value, following)
    return following + nan_where(truncated & (num_before >= len(final_values) - 1))


def discounted_returns(rewards: jax.Array, ended: jax.Array, *, discount: float) -> jax.Array:
    """Discounted return-to-go of every step, within its episode and the window.

        R_t = r_t + discount (1 - ended_t) R_{t+1},  R_T = 0

    Args:
      rewards: `[T, ...]`.
      ended: `[T, ...]`, true on the last step of an episode.
      discount: in [0, 1].

    Returns:
      `[T, ...]`, in the units of the rewards.
    """
    chex.assert_equal_shape([rewards, ended])
    return _accumulate(at_least_float32(rewards), ended.astype(bool), discount)


def _accumulate(terms: jax.Array, ended: jax.Array, decay: float) -> jax.Array:
    """x_t = terms_t + decay (1 - ended_t) x_{t+1}, backwards over the first axis."""

    def step(later: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        term, end = now
        total = term + decay * jnp.where(end, 0.0, later)
        return total, total

    def loop(*xs, unroll):
        zeros = jnp.zeros(terms.shape[1:], jnp.result_type(terms, decay))
        return jax.lax.scan(step, zeros, xs, reverse=True, unroll=unroll)[1]

    # An accelerator spends more on the loop than on its few operations; a CPU would only compile longer.
    loops = {"cpu": functools.partial(loop, unroll=1), "default": functools.partial(loop, unroll=16)}
    return jax.lax.platform_dependent(terms, ended, **loops)


def bootstrapped_returns(
    rewards: jax.Array, final_values: jax.Array, terminated: jax.Array, truncated: jax.Array, *, discount: float
) -> jax.Array:
    """Discounted return-to-go of every step, bootstrapped where a limit or the end of the window cut it.

        R_t = r_t + discount (1 - terminated_t) R_{t+1},  with V(s') for R_{t+1} where truncated and at the window's end

    Args:
      rewards: `[T, N]`.
      final_values: `[F, N]`, as `next_values` takes them.
      terminated, truncated: `[T, N]` bool.
      discount: in [0, 1].

    Returns:
      `[T, N]`, in the units of the rewards.
    """
    # R_t - 0 = GAE of values 0 at lambda 1, whose next values are V(s') where a return is cut, and 0 elsewhere
    after_window = jnp.broadcast_to(final_values[-1], rewards.shape)
    bootstraps = next_values(after_window, final_values, truncated)
    bootstraps = jnp.where(jnp.asarray(truncated).at[-1].set(True), bootstraps, 0.0)
    return gae(rewards, jnp.zeros_like(rewards), bootstraps, terminated, truncated, discount=discount, gae_lambda=1.0)


def returns_to_go(trajectory: Trajectory, hyperparams: Hyperparams, group_size: int) -> jax.Array:
    """The discounted return-to-go of each step, without a baseline."""
    return discounted_returns(trajectory.reward, trajectory.ended, discount=hyperparams.discount)


def return_to_go_advantage(trajectory: Trajectory, hyperparams: Hyperparams, group_size: int) -> jax.Array:
    """Discounted return-to-go minus the mean of the group's others at the same step."""
    returns = returns_to_go(trajectory, hyperparams, group_size)
    others = same_step_leave_one_out(returns, trajectory.valid, group_size)
    sizes = score_sizes(trajectory.reward, trajectory, group_size)  # rounding alone may have made a difference
    advantage = above_rounding(returns - others, jnp.repeat(sizes[:, 0], group_size)[None])
    return jnp.where(trajectory.valid, advantage, 0.0)


def gae_advantage(trajectory: Trajectory, hyperparams: Hyperparams, group_size: int) -> jax.Array:
    """Generalised advantage estimation on the values of the baseline, or else of the critic."""
    return gae(
        trajectory.reward,
        trajectory.value,
        trajectory.next_value,
        trajectory.terminated,
        trajectory.truncated,
        discount=hyperparams.discount,
        gae_lambda=hyperparams.gae_lambda,
    )


def return_minus_value_advantage(trajectory: Trajectory, hyperparams: Hyperparams, group_size: int) -> jax.Array:
    """Discounted return-to-go minus the value of the baseline, or else of the critic.

    Where a limit or the end of the window cut a return, the same values bootstrap it.
    """
    return gae_advantage(trajectory, hyperparams.replace(gae_lambda=1.0), group_size)

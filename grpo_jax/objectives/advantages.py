"""Advantages that compare the members of a group.

Scores are `[num_groups, group_size]`, one number for each rollout: the members of a group (rollouts from the same
start) are on the last axis. The result has the same shape, and the units of the scores unless it is normalised. A group
whose scores are equal up to rounding gets exactly 0, at any magnitude of the scores. A NaN spoils its own group only,
except where an estimator normalises over the batch.

Numbers for single steps are time-major, `[T, N]`: rollout `g * group_size + i` is member `i` of group `g`, where
`group_size` (static) divides `N`. A mask is true on the valid steps; values on the others, NaN included, are ignored,
and the advantage there is 0.

Numbers are divided by `std + eps`, in their units, where std is the population's standard deviation (`ddof=0`, as
published) or the root of the unbiased variance (`ddof=1`, as most trainers compute it).
"""

import chex
import jax
import jax.numpy as jnp
from jax.lax import broadcast_to_rank

from grpo_jax.hyperparams import Hyperparams
from grpo_jax.objectives.whitening import centred, std
from grpo_jax.precision import above_rounding, at_least_float32
from grpo_jax.types import Trajectory

__all__ = ["batch_normalized", "decoupled_normalized", "greedy_baseline", "group_centered", "group_normalized"]
__all__ += ["leave_one_out", "pass_at_k", "process_supervised", "process_supervised_advantage"]
__all__ += ["max_rl", "same_step_leave_one_out"]


def group_normalized(
    scores: jax.Array, mask: jax.Array | None = None, *, eps: float = 1e-6, ddof: float = 0
) -> jax.Array:
    """Scores in standard deviations from the mean of their group.

        A_i = (r_i - mean(r)) / (std(r) + eps)

    GRPO, DeepSeekMath (https://arxiv.org/abs/2402.03300). Scores outside the mask, all of them by default inside, count
    in no mean and no deviation, and get 0.
    """
    _check_groups(scores.shape[-1], "group_normalized")
    deviations = centred(scores, mask)
    return deviations / (std(deviations, mask, ddof=ddof) + eps)


def group_centered(scores: jax.Array) -> jax.Array:
    """Scores minus the mean of their group.

        A_i = r_i - mean(r)

    Dr. GRPO (https://arxiv.org/abs/2503.20783): without the division by the standard deviation, which weighs easy and
    hard starts more than those in between.
    """
    _check_groups(scores.shape[-1], "group_centered")
    return centred(scores)


def leave_one_out(scores: jax.Array) -> jax.Array:
    """Scores minus the mean of the other members: the unbiased baseline of a group.

        A_i = r_i - 1/(G-1) sum_{j != i} r_j = G/(G-1) (r_i - mean(r))

    RLOO (https://arxiv.org/abs/2402.14740).
    """
    group_size = scores.shape[-1]
    _check_groups(group_size, "leave_one_out")
    return centred(scores) * (group_size / (group_size - 1))


def batch_normalized(scores: jax.Array, *, eps: float = 1e-6, ddof: float = 0) -> jax.Array:
    """Scores centred in their group and scaled by the standard deviation of the whole batch.

        A_gi = (r_gi - mean(r_g)) / (std(r) + eps),  std over all groups and members

    Lite PPO (https://arxiv.org/abs/2508.08221). One NaN makes the whole batch NaN.
    """
    _check_groups(scores.shape[-1], "batch_normalized")
    return centred(scores) / (std(centred(scores, axis=None), axis=None, ddof=ddof) + eps)


def max_rl(scores: jax.Array) -> jax.Array:
    """Scores relative to the mean of their group.

        A_i = (r_i - mean(r)) / mean(r)

    MaxRL (https://arxiv.org/abs/2602.02710), for scores that are at least 0, such as 1 for success: starts that rarely
    succeed weigh more. A group whose mean is not above 0 gets exactly 0.
    """
    _check_groups(scores.shape[-1], "max_rl")
    mean = jnp.mean(at_least_float32(scores), axis=-1, keepdims=True)
    return jnp.where(mean > 0, centred(scores) / jnp.where(mean > 0, mean, 1.0), 0.0)


def greedy_baseline(scores: jax.Array, greedy_scores: jax.Array) -> jax.Array:
    """Scores minus the score of the greedy rollout from the same start.

        A_gi = r_gi - r_g(argmax policy)

    ReMax (https://arxiv.org/abs/2310.10505). Groups of one are enough.

    Args:
      scores: `[num_groups, group_size]` of the sampled rollouts.
      greedy_scores: `[num_groups]` of a rollout that takes the most likely action at every step.
    """
    chex.assert_shape(greedy_scores, scores.shape[:-1])
    return at_least_float32(scores) - at_least_float32(greedy_scores)[..., None]


def pass_at_k(scores: jax.Array, *, eps: float = 1e-6, ddof: float = 0) -> jax.Array:
    """Only the best member counts, with its lead over the second best.

        A_i = (r_best - r_second) / (std(r) + eps) if i is the best, else 0

    Pass@k policy gradient (https://arxiv.org/abs/2503.19595). A group in which two reach the best score gets exactly 0.
    """
    group_size = scores.shape[-1]
    _check_groups(group_size, "pass_at_k")
    scores = at_least_float32(scores)
    (best, second), (index, _) = (jnp.moveaxis(x, -1, 0)[..., None] for x in jax.lax.top_k(scores, 2))
    lead = above_rounding(best - second, best, second)
    lead = lead / (std(centred(scores), ddof=ddof) + eps)
    is_best = jax.nn.one_hot(index[..., 0], group_size, dtype=bool)
    return jnp.where(is_best, lead, 0.0)


def process_supervised(
    rewards: jax.Array,
    mask: jax.Array,
    group_size: int,
    *,
    rewarded: jax.Array | None = None,
    eps: float = 1e-6,
    ddof: float = 0,
) -> jax.Array:
    """Rewards of single steps, normalised over all rewarded steps of the group, then summed to go.

        A_t = sum_{rewarded s >= t} (r_s - mean(r)) / (std(r) + eps),  mean and std over those of all members

    GRPO with process supervision (https://arxiv.org/abs/2402.03300, section 4.1.3). Where every step pays the same
    (CartPole) the advantages are exactly 0, so there is nothing to learn.

    Args:
      rewards: `[T, N]`, one for each step.
      mask: `[T, N]`, true on the valid steps.
      group_size: members of a group; divides `N`. Static.
      rewarded: `[T, N]`, true on the steps that have a reward, such as the ends of reasoning steps. Other valid
        steps get the sum of the later ones. None: all.

    Returns:
      `[T, N]`.
    """
    _check_groups(group_size, "process_supervised")
    rewards, valid = _by_group(rewards, group_size), _by_group(mask, group_size).astype(bool)
    counted = valid if rewarded is None else valid & _by_group(rewarded, group_size).astype(bool)
    over_group = (0, 2)
    deviations = centred(rewards, counted, axis=over_group)
    normalised = deviations / (std(deviations, counted, axis=over_group, ddof=ddof) + eps)
    to_go = jax.lax.cumsum(normalised, axis=0, reverse=True)
    return jnp.where(valid, to_go, 0.0).reshape(mask.shape)


def process_supervised_advantage(trajectory: Trajectory, hyperparams: Hyperparams, group_size: int) -> jax.Array:
    """Step rewards, standardised over the rewarded steps of the group and summed to go."""
    parts = trajectory.reward_parts
    rewarded = None if parts is None or parts.rewarded is None else jnp.any(parts.rewarded, axis=-1)
    deviation = {"ddof": hyperparams.score_ddof, "eps": hyperparams.score_eps}
    return process_supervised(trajectory.reward, trajectory.valid, group_size, rewarded=rewarded, **deviation)


def decoupled_normalized(
    scores_per_reward: jax.Array,
    weights: jax.Array,
    rewarded: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    ddof: float = 0,
) -> jax.Array:
    """The weighted sum of reward components, each normalised in its group.

        A_i = sum_k w_k (r_ki - mean(r_k)) / (std(r_k) + eps)

    GDPO (https://arxiv.org/abs/2601.05242): normalising the sum of the rewards instead lets the component with the
    largest spread drown the others. The paper whitens the result over the batch (`whiten`).

    Args:
      scores_per_reward: `[num_rewards, num_groups, group_size]`.
      weights: `[num_rewards]`, or `[num_rewards, num_groups]` where they differ between groups.
      rewarded: bool, as the scores: whether the component applies to the rollout. Elsewhere it counts in no mean and no
        deviation, and adds 0. None: everywhere.

    Returns:
      `[num_groups, group_size]`; a component that is constant in a group adds exactly 0 there.
    """
    normalized = group_normalized(scores_per_reward, rewarded, eps=eps, ddof=ddof)
    weights = at_least_float32(weights)
    weights = weights.reshape(weights.shape + (1,) * (normalized.ndim - weights.ndim))
    return jnp.sum(weights * normalized, axis=0)


def same_step_leave_one_out(returns: jax.Array, mask: jax.Array, group_size: int) -> jax.Array:
    """The mean return-to-go of the other members of the group at the same step.

        V_it = mean_{j != i, j valid at t} R_jt

    Args:
      returns: `[T, N]` returns-to-go.
      mask: `[T, N]`, true on the valid steps.
      group_size: members of a group, at least 2; divides `N`. Static.

    Returns:
      `[T, N]`, in the units of the returns; exact where the other members' returns are equal, 0 where there are none.
    """
    _check_groups(group_size, "same_step_leave_one_out")
    returns = _by_group(at_least_float32(returns), group_size)
    counted = _by_group(mask, group_size).astype(bool) & jnp.isfinite(returns)
    returns = jnp.where(counted, returns, 0.0)
    others = counted[..., None, :] & broadcast_to_rank(~jnp.eye(group_size, dtype=bool), counted.ndim + 1)
    # Less the return of a neighbour, so that the mean of equal numbers is their number to the last bit.
    neighbour = jnp.roll(returns, -1, axis=-1)
    excess = jnp.sum(returns[..., None, :] - neighbour[..., None], axis=-1, where=others)
    number = jnp.sum(others, axis=-1, dtype=float)
    return jnp.where(number > 0, neighbour + excess / jnp.maximum(number, 1), 0.0).reshape(mask.shape)


def _by_group(x: jax.Array, group_size: int) -> jax.Array:
    """[T, N] -> [T, num_groups, group_size]."""
    if x.shape[1] % group_size:
        raise ValueError(
            f"{x.shape[1]} rollouts do not split into groups of {group_size}: groups lie one after the other along "
            "the second axis, so its length must be a multiple of group_size."
        )
    return x.reshape(x.shape[0], -1, group_size)


def _check_groups(group_size: int, name: str) -> None:
    if group_size < 2:
        raise ValueError(
            f"{name} compares the members of a group, but group_size is {group_size}: one rollout has nothing to be "
            f"compared with. Use group_size >= 2, or an estimator without groups: greedy_baseline, gae, "
            f"kernel_values, or whitened(returns_to_go)."
        )

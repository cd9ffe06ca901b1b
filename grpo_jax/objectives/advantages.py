"""Advantage estimators: who did better than its group, and by how much.

Scores are `[num_groups, group_size]`: one number for each rollout, and the members of a group (rollouts from the same
start) on the last axis. Trajectories are time-major, `[T, N]`, with the groups one after the other along `N`:
rollout `g * group_size + i` is member `i` of group `g`. A mask is true on the valid steps; whatever stands on the
others, NaN included, is ignored, and the advantage there is 0.

A group whose scores are all equal teaches nothing, and gets exactly 0 whatever their magnitude. A score that is NaN
spoils its own group only, except where an estimator normalises over the batch.

Numbers may be of any type; half precision, integers and booleans are computed with as `precision` says.
"""

import chex
import jax
import jax.numpy as jnp

from grpo_jax.precision import at_least_float32


def group_normalized(scores: jax.Array, *, eps: float = 1e-6, ddof: int = 0) -> jax.Array:
    """Scores in standard deviations from the mean of their group.

        A_i = (r_i - mean(r)) / (std(r) + eps)

    GRPO, DeepSeekMath (https://arxiv.org/abs/2402.03300).

    Args:
      scores: `[num_groups, group_size]`.
      eps: floor of the standard deviation, in the units of the scores.
      ddof: 0 for the population's standard deviation (the published formula), 1 for the unbiased variance (what most
        published trainers compute).

    Returns:
      `[num_groups, group_size]`; exactly 0 for a group of equal scores.
    """
    _check_groups(scores.shape[-1], "group_normalized")
    centred = _centred(scores)
    return centred / (_std(centred, ddof=ddof) + eps)


def group_centered(scores: jax.Array) -> jax.Array:
    """Scores minus the mean of their group.

        A_i = r_i - mean(r)

    Dr. GRPO (https://arxiv.org/abs/2503.20783): without the division by the standard deviation, which weighs easy and
    hard starts more than those in between.

    Args:
      scores: `[num_groups, group_size]`.

    Returns:
      `[num_groups, group_size]`, in the units of the scores; exactly 0 for a group of equal scores.
    """
    _check_groups(scores.shape[-1], "group_centered")
    return _centred(scores)


def leave_one_out(scores: jax.Array) -> jax.Array:
    """Scores minus the mean of the other members: the unbiased baseline of a group.

        A_i = r_i - 1/(G-1) sum_{j != i} r_j = G/(G-1) (r_i - mean(r))

    RLOO (https://arxiv.org/abs/2402.14740).

    Args:
      scores: `[num_groups, group_size]`.

    Returns:
      `[num_groups, group_size]`, in the units of the scores; exactly 0 for a group of equal scores.
    """
    group_size = scores.shape[-1]
    _check_groups(group_size, "leave_one_out")
    return _centred(scores) * (group_size / (group_size - 1))


def batch_normalized(scores: jax.Array, *, eps: float = 1e-6, ddof: int = 0) -> jax.Array:
    """Scores centred in their group and scaled by the standard deviation of the whole batch.

        A_gi = (r_gi - mean(r_g)) / (std(r) + eps),  std over all groups and members

    Lite PPO (https://arxiv.org/abs/2508.08221).

    Args:
      scores: `[num_groups, group_size]`.
      eps: floor of the standard deviation, in the units of the scores.
      ddof: as in `group_normalized`.

    Returns:
      `[num_groups, group_size]`; exactly 0 for a group of equal scores. One NaN makes the whole batch NaN.
    """
    _check_groups(scores.shape[-1], "batch_normalized")
    return _centred(scores) / (_std(_centred(scores, axis=None), axis=None, ddof=ddof) + eps)


def reinforce_plus_plus(returns: jax.Array, mask: jax.Array, *, eps: float = 1e-8, ddof: int = 0) -> jax.Array:
    """Returns-to-go, whitened over the valid steps of the batch.

        A_t = (R_t - mean(R)) / (std(R) + eps),  R_t = r_t + discount R_{t+1}

    REINFORCE++ (https://arxiv.org/abs/2501.03262). No groups are needed: the baseline is one number for the batch.

    Args:
      returns: `[T, N]` discounted returns-to-go (`discounted_returns`).
      mask: `[T, N]`, true on the valid steps.
      eps: floor of the standard deviation, in the units of the returns.
      ddof: as in `group_normalized`.

    Returns:
      `[T, N]`; exactly 0 if all valid returns are equal, and on invalid steps.
    """
    return whiten(returns, mask, eps=eps, ddof=ddof)


def reinforce_plus_plus_baseline(scores: jax.Array, mask: jax.Array, *, eps: float = 1e-8, ddof: int = 0) -> jax.Array:
    """Scores centred in their group, spread over the steps of their rollout and whitened over all valid steps.

        A_t = (a - mean(a)) / (std(a) + eps),  a_gi = r_gi - mean(r_g),  mean and std over valid steps

    REINFORCE++-baseline (https://arxiv.org/abs/2501.03262). A long rollout weighs more in mean and std than a short
    one.

    Args:
      scores: `[num_groups, group_size]`.
      mask: `[T, num_groups * group_size]`, true on the valid steps.
      eps: floor of the standard deviation, in the units of the scores.
      ddof: as in `group_normalized`.

    Returns:
      `[T, num_groups * group_size]`. A group of equal scores gets minus the batch's mean, which is 0 only where all
      rollouts are equally long; 0 on invalid steps.
    """
    _check_groups(scores.shape[-1], "reinforce_plus_plus_baseline")
    return whiten(jnp.broadcast_to(_centred(scores).reshape(-1), mask.shape), mask, eps=eps, ddof=ddof)


def greedy_baseline(scores: jax.Array, greedy_scores: jax.Array) -> jax.Array:
    """Scores minus that of the greedy rollout from the same start.

        A_gi = r_gi - r_g(argmax policy)

    ReMax (https://arxiv.org/abs/2310.10505). Groups of one are enough.

    Args:
      scores: `[num_groups, group_size]` of the sampled rollouts.
      greedy_scores: `[num_groups]` of a rollout that takes the most likely action at every step.

    Returns:
      `[num_groups, group_size]`, in the units of the scores; exactly 0 where a rollout scores as the greedy one does.
    """
    return at_least_float32(scores) - at_least_float32(greedy_scores)[..., None]


def length_weighted(scores: jax.Array, lengths: jax.Array) -> jax.Array:
    """Scores minus the mean of their group weighted by length: the baseline of least variance for summed losses.

        A_i = r_i - sum_j(len_j r_j) / sum_j(len_j)

    OPO (https://arxiv.org/abs/2505.23585).

    Args:
      scores: `[num_groups, group_size]`.
      lengths: `[num_groups, group_size]`, the number of valid steps of each rollout.

    Returns:
      `[num_groups, group_size]`, in the units of the scores; exactly 0 for a group of equal scores. A group without
      any valid step is weighted evenly.
    """
    _check_groups(scores.shape[-1], "length_weighted")
    chex.assert_equal_shape([scores, lengths])
    lengths = at_least_float32(lengths)
    weights = jnp.where(jnp.sum(lengths, axis=-1, keepdims=True) > 0, lengths, 1)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    centred = _centred(scores)
    return centred - jnp.sum(weights * centred, axis=-1, keepdims=True)


def pass_at_k(scores: jax.Array, *, normalize: bool = True, eps: float = 1e-6, ddof: int = 0) -> jax.Array:
    """Only the best member counts, with its lead over the second best.

        A_i = (r_best - r_second) / (std(r) + eps) if i is the best, else 0

    Pass@k policy gradient (https://arxiv.org/abs/2503.19595).

    Args:
      scores: `[num_groups, group_size]`.
      normalize: divide by the standard deviation of the group. Static.
      eps: floor of the standard deviation, in the units of the scores.
      ddof: as in `group_normalized`.

    Returns:
      `[num_groups, group_size]`; exactly 0 for a group in which the best score is reached twice.
    """
    group_size = scores.shape[-1]
    _check_groups(group_size, "pass_at_k")
    scores = at_least_float32(scores)
    (best, second), (index, _) = (jnp.moveaxis(x, -1, 0)[..., None] for x in jax.lax.top_k(scores, 2))
    lead = best - second
    if normalize:
        lead = lead / (_std(_centred(scores), ddof=ddof) + eps)
    return jnp.where(jnp.arange(group_size) == index, lead, 0.0)


def process_supervised(
    rewards: jax.Array,
    mask: jax.Array,
    group_size: int,
    *,
    judged: jax.Array | None = None,
    eps: float = 1e-6,
    ddof: int = 0,
) -> jax.Array:
    """Rewards of single steps, normalised over all judged steps of the group, then summed to go.

        A_t = sum_{judged s >= t} (r_s - mean(r)) / (std(r) + eps),  mean and std over the judged steps of all members

    GRPO with process supervision (https://arxiv.org/abs/2402.03300, section 4.1.3). Where every step pays the same
    (CartPole) it has nothing to learn from: the advantages are 0.

    Args:
      rewards: `[T, N]`, one for each step.
      mask: `[T, N]`, true on the valid steps.
      group_size: members of a group; divides `N`. Static.
      judged: `[T, N]`, true on the steps that have a reward of their own, such as the ends of reasoning steps; a step
        that is valid and not judged gets the sum of those that follow. None: all.
      eps: floor of the standard deviation, in the units of the rewards.
      ddof: as in `group_normalized`.

    Returns:
      `[T, N]`; exactly 0 for a group whose rewards are all equal, and on invalid steps.
    """
    _check_groups(group_size, "process_supervised")
    rewards, valid = _by_group(rewards, group_size), _by_group(mask, group_size).astype(bool)
    rewarded = valid if judged is None else valid & _by_group(judged, group_size).astype(bool)
    over_group = (0, 2)
    centred = _centred(rewards, rewarded, axis=over_group)
    normalised = centred / (_std(centred, rewarded, axis=over_group, ddof=ddof) + eps)
    to_go = jax.lax.cumsum(normalised, axis=0, reverse=True)
    return jnp.where(valid, to_go, 0.0).reshape(mask.shape)


def time_aligned_leave_one_out(returns_to_go: jax.Array, mask: jax.Array, group_size: int) -> jax.Array:
    """Return-to-go minus the mean of the other members at the same step.

        A_it = R_it - mean_{j != i, j valid at t} R_jt

    For windows of longer episodes, where the return of the whole rollout would credit a step with what came before it.

    Args:
      returns_to_go: `[T, N]` (`discounted_returns`).
      mask: `[T, N]`, true on the valid steps.
      group_size: members of a group; divides `N`. Static.

    Returns:
      `[T, N]`, in the units of the returns: exactly 0 where all valid members are equal, and on invalid steps; the
      return itself where no other member is valid.
    """
    returns, valid = at_least_float32(_by_group(returns_to_go, group_size)), _by_group(mask, group_size).astype(bool)
    _check_groups(group_size, "time_aligned_leave_one_out")
    others = jnp.sum(valid, axis=-1, keepdims=True) - 1
    advantages = _centred(returns, valid) * (1 + 1 / jnp.maximum(others, 1))
    return jnp.where(valid, jnp.where(others > 0, advantages, returns), 0.0).reshape(mask.shape)


def decoupled_normalized(
    scores_per_reward: jax.Array, weights: jax.Array, *, eps: float = 1e-6, ddof: int = 0
) -> jax.Array:
    """Every reward component normalised in its group by itself, then the weighted sum.

        A_i = sum_k w_k (r_ki - mean(r_k)) / (std(r_k) + eps)

    GDPO (https://arxiv.org/abs/2601.05242): normalising the sum of the rewards instead lets the component with the
    largest spread drown the others. The paper whitens the result over the batch (`whiten`).

    Args:
      scores_per_reward: `[num_rewards, num_groups, group_size]`.
      weights: `[num_rewards]`.
      eps: floor of each standard deviation, in the units of its reward.
      ddof: as in `group_normalized`.

    Returns:
      `[num_groups, group_size]`; a component that is constant in a group adds exactly 0 there.
    """
    return jnp.tensordot(at_least_float32(weights), group_normalized(scores_per_reward, eps=eps, ddof=ddof), axes=1)


def whiten(advantages: jax.Array, mask: jax.Array | None = None, *, eps: float = 1e-8, ddof: int = 0) -> jax.Array:
    """Advantages in standard deviations from their mean, over all valid entries: PPO's normalisation of a minibatch.

        (A - mean(A)) / (std(A) + eps)

    Args:
      advantages: any shape.
      mask: the same shape, true on the valid entries; all of them without it.
      eps: floor of the standard deviation, in the units of the advantages.
      ddof: as in `group_normalized`.

    Returns:
      The same shape; exactly 0 if all valid entries are equal, and on invalid ones.
    """
    valid = None if mask is None else mask.astype(bool)
    centred = _centred(advantages, valid, axis=None)
    return centred / (_std(centred, valid, axis=None, ddof=ddof) + eps)


def scale_by_rms(advantages: jax.Array, mask: jax.Array | None = None, *, eps: float = 1e-8) -> jax.Array:
    """Advantages over their root mean square, over all valid entries: signs stay as they are.

        A / (sqrt(mean(A^2)) + eps)

    For advantages relative to a baseline, which say by themselves what was better than expected.

    Args:
      advantages: any shape.
      mask: the same shape, true on the valid entries; all of them without it.
      eps: floor of the root mean square, in the units of the advantages.

    Returns:
      The same shape; exactly 0 if all valid entries are 0, and on invalid ones.
    """
    valid = jnp.ones(advantages.shape, bool) if mask is None else mask.astype(bool)
    valued = jnp.where(valid, at_least_float32(advantages), 0.0)
    return valued / (_std(valued, valid, axis=None, ddof=0) + eps)


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
      next_values: `[T, ...]`, of the true observation after the step: the final one of its episode where the step
        ended it, never the first one of the next. Ignored where terminated.
      terminated: `[T, ...]`, true where the task ended the episode.
      truncated: `[T, ...]`, true where a limit cut it.
      discount: in [0, 1].
      gae_lambda: in [0, 1]; 0 is the one-step error, 1 is return minus value.

    Returns:
      `[T, ...]`, in the units of the values.
    """
    chex.assert_equal_shape([rewards, values, next_values, terminated, truncated])
    rewards, values, next_values = map(at_least_float32, (rewards, values, next_values))
    terminated, ended = terminated.astype(bool), jnp.logical_or(terminated, truncated)
    deltas = rewards + discount * jnp.where(terminated, 0.0, next_values) - values
    return _accumulate(deltas, ended, discount * gae_lambda)


def next_values(values: jax.Array, final_values: jax.Array, truncated: jax.Array) -> jax.Array:
    """Values of the true next observations, for `gae`: of the next step, or where a limit cut the episode of its end.

    Args:
      values: `[T, N]`, of the observation before each step.
      final_values: `[F, N]`, of observations that no step begins with: in the order of truncation of the final ones of
        truncated episodes, and last of what stands after the window. `F` = 1 where nothing follows an episode, whose
        final observation then stands until the next step.
      truncated: `[T, N]` bool.

    Returns:
      `[T, N]`; NaN where a rollout was truncated more often than there are values for.
    """
    values, final_values = at_least_float32(values), at_least_float32(final_values)
    following = jnp.concatenate([values[1:], final_values[-1:]])
    if len(final_values) == 1:
        return following
    num_before = jnp.cumsum(truncated, axis=0) - truncated
    for number, final_value in enumerate(final_values[:-1]):
        following = jnp.where(truncated & (num_before == number), final_value, following)
    return jnp.where(truncated & (num_before >= len(final_values) - 1), jnp.nan, following)


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

    nothing = jnp.zeros(terms.shape[1:], jnp.result_type(terms, decay))
    return jax.lax.scan(step, nothing, (terms, ended), reverse=True)[1]


def _centred(x: jax.Array, valid: jax.Array | None = None, axis=-1) -> jax.Array:
    """Minus the mean over `axis`; 0 where not valid."""
    x = at_least_float32(x)
    # float32 means are off by an ulp, so the mean of equal numbers need not equal them; the mean of zeros does.
    valid = jnp.ones(x.shape, bool) if valid is None else valid
    lowest = jnp.min(x, axis, keepdims=True, where=valid, initial=jnp.inf)
    shifted = jnp.where(valid, x - lowest, 0.0)
    mean = jnp.sum(shifted, axis, keepdims=True) / jnp.maximum(jnp.sum(valid, axis, keepdims=True), 1)
    return jnp.where(valid, shifted - mean, 0.0)


def _std(centred: jax.Array, valid: jax.Array | None = None, axis=-1, *, ddof: int) -> jax.Array:
    """Standard deviation over `axis`, which is kept, of what `_centred` returns."""
    # Squares of 1e30 overflow float32 and those of 1e-30 vanish: take the largest deviation out first.
    largest = jnp.max(jnp.abs(centred), axis, keepdims=True, initial=0.0)
    scale = jnp.where(largest == 0, 1.0, largest)
    count = jnp.sum(jnp.ones(centred.shape, bool) if valid is None else valid, axis, keepdims=True)
    squares = jnp.sum(jnp.square(centred / scale), axis, keepdims=True)
    return scale * jnp.sqrt(squares / jnp.maximum(count - ddof, 1))


def _by_group(x: jax.Array, group_size: int) -> jax.Array:
    """[T, N] -> [T, num_groups, group_size]."""
    num_rollouts = x.shape[1]
    if num_rollouts % group_size:
        raise ValueError(
            f"{num_rollouts} rollouts do not split into groups of {group_size}: groups lie one after the other along "
            f"the second axis, so its length must be a multiple of group_size."
        )
    return x.reshape(x.shape[0], num_rollouts // group_size, group_size)


def _check_groups(group_size: int, name: str) -> None:
    if group_size < 2:
        raise ValueError(
            f"{name} compares the members of a group, but group_size is {group_size}: one rollout has nothing to be "
            f"compared with. Use group_size >= 2, or an estimator without groups: reinforce_plus_plus, "
            f"greedy_baseline, gae."
        )

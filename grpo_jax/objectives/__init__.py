"""Formulas and the slots they fill: arrays in, arrays out.

| slot of an `Algorithm` | what can fill it is in |
|---|---|
| `advantage` | `advantages`, `returns`, by `outcome` and `whitened` of `slots` |
| `normalize` | `whitening` |
| `ratio` | `ratios`, `covariance` |
| `surrogate` | `surrogates`, by `tuned` of `slots` |
| `penalties`, `reference`, `reward`, `kl_controller` | `penalties`, with the estimates of `divergences` |
| `reduce` | `reductions` |
| `critic` | `losses` |

The slot `baseline` is filled by `grpo_jax.baselines`.
"""

from grpo_jax.objectives.advantages import (
    batch_normalized,
    decoupled_normalized,
    greedy_baseline,
    group_centered,
    group_normalized,
    leave_one_out,
    length_weighted,
    pass_at_k,
    process_supervised,
    process_supervised_advantage,
    same_step_leave_one_out,
)
from grpo_jax.objectives.covariance import (
    covariance_clipped_ratio,
    covariance_kl,
    most_covariant_steps,
    random_covariant_steps,
)
from grpo_jax.objectives.divergences import abs_k1, exact, k1, k2, k2_straight_through, k3, k3_from_behaviour
from grpo_jax.objectives.losses import explained_variance, grpo_loss, ppo_loss, value_loss
from grpo_jax.objectives.penalties import (
    KL_PENALTIES,
    adaptive_coefficient,
    averaged_reference,
    doubling_coefficient,
    entropy_bonus,
    exact_kl_to_reference,
    frozen_reference,
    kl_penalized_reward,
    kl_to_behaviour,
    kl_to_reference,
    penalized_rewards,
    refreshed_reference,
)
from grpo_jax.objectives.ratios import (
    geometric_mean_log_ratio,
    geometric_mean_ratio,
    importance_ratio,
    sequence_log_ratio,
    sequence_ratio,
    sequence_token_log_ratio,
    sequence_token_ratio,
    step_ratio,
)
from grpo_jax.objectives.reductions import (
    mean_of_sequence_means,
    mean_of_sequence_sums,
    mean_over_steps,
    sum_over_horizon,
    weighted_sum,
)
from grpo_jax.objectives.returns import (
    all_actions_advantage,
    bootstrapped_returns,
    discounted_returns,
    gae,
    gae_advantage,
    next_values,
    return_minus_value_advantage,
    return_to_go_advantage,
    returns_to_go,
)
from grpo_jax.objectives.slots import (
    episode_lengths,
    episode_scores,
    greedy_scores,
    outcome,
    reward_part_scores,
    reward_part_weights,
    tuned,
    whitened,
)
from grpo_jax.objectives.surrogates import (
    cispo_surrogate,
    clip_fractions,
    clipped_surrogate,
    policy_gradient_surrogate,
    sapo_surrogate,
    unclipped_surrogate,
)
from grpo_jax.objectives.whitening import scale_by_rms, whiten

__all__ = [
    "KL_PENALTIES",
    "abs_k1",
    "adaptive_coefficient",
    "all_actions_advantage",
    "averaged_reference",
    "batch_normalized",
    "bootstrapped_returns",
    "cispo_surrogate",
    "clip_fractions",
    "clipped_surrogate",
    "covariance_clipped_ratio",
    "covariance_kl",
    "decoupled_normalized",
    "discounted_returns",
    "doubling_coefficient",
    "entropy_bonus",
    "episode_lengths",
    "episode_scores",
    "exact",
    "exact_kl_to_reference",
    "explained_variance",
    "frozen_reference",
    "gae",
    "gae_advantage",
    "geometric_mean_log_ratio",
    "geometric_mean_ratio",
    "greedy_baseline",
    "greedy_scores",
    "group_centered",
    "group_normalized",
    "grpo_loss",
    "importance_ratio",
    "k1",
    "k2",
    "k2_straight_through",
    "k3",
    "k3_from_behaviour",
    "kl_penalized_reward",
    "kl_to_behaviour",
    "kl_to_reference",
    "leave_one_out",
    "length_weighted",
    "mean_of_sequence_means",
    "mean_of_sequence_sums",
    "mean_over_steps",
    "most_covariant_steps",
    "next_values",
    "outcome",
    "pass_at_k",
    "penalized_rewards",
    "policy_gradient_surrogate",
    "ppo_loss",
    "process_supervised",
    "process_supervised_advantage",
    "random_covariant_steps",
    "refreshed_reference",
    "return_minus_value_advantage",
    "return_to_go_advantage",
    "returns_to_go",
    "reward_part_scores",
    "reward_part_weights",
    "same_step_leave_one_out",
    "sapo_surrogate",
    "scale_by_rms",
    "sequence_log_ratio",
    "sequence_ratio",
    "sequence_token_log_ratio",
    "sequence_token_ratio",
    "step_ratio",
    "sum_over_horizon",
    "tuned",
    "unclipped_surrogate",
    "value_loss",
    "weighted_sum",
    "whiten",
    "whitened",
]

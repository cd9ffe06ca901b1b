"""Algorithms as values: tuples of pure functions, one for each decision. A variant replaces some of them.

`DR_GRPO = GRPO._replace(advantage=outcome(group_centered), reduce=sum_over_horizon)`
"""

from typing import NamedTuple, Protocol

import jax

from grpo_jax.baselines import (
    Baseline,
    kernel_baseline,
    lstd_baseline,
    recursive_lstd_baseline,
    same_step_baseline,
    state_hash_baseline,
)
from grpo_jax.errors import ConfigError, nearest
from grpo_jax.groups import ANCHORED, CONTINUE, FRESH, Start
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.objectives import (
    KL_PENALTIES,
    cispo_surrogate,
    clipped_surrogate,
    covariance_clipped_ratio,
    covariance_kl,
    entropy_bonus,
    episode_lengths,
    episode_scores,
    frozen_reference,
    gae_advantage,
    geometric_mean_ratio,
    greedy_baseline,
    greedy_scores,
    group_centered,
    group_normalized,
    kl_to_behaviour,
    kl_to_reference,
    leave_one_out,
    length_weighted,
    mean_of_sequence_means,
    mean_over_steps,
    outcome,
    pass_at_k,
    policy_gradient_surrogate,
    process_supervised_advantage,
    return_minus_value_advantage,
    return_to_go_advantage,
    returns_to_go,
    sapo_surrogate,
    scale_by_rms,
    sequence_ratio,
    step_ratio,
    sum_over_horizon,
    tuned,
    unclipped_surrogate,
    value_loss,
    whiten,
    whitened,
)
from grpo_jax.types import Batch, Prediction, PyTree, Trajectory


class Advantage(Protocol):
    """How much better each step was than the steps that it is compared with."""

    def __call__(self, trajectory: Trajectory, hyperparams: Hyperparams, group_size: int) -> jax.Array:
        """`[T, B]`, 0 where not valid."""


class Normalize(Protocol):
    """The normalisation of the advantages of each minibatch."""

    def __call__(self, advantage: jax.Array, mask: jax.Array) -> jax.Array:
        """`[S, N]` advantages and their mask, to `[S, N]`."""


class Ratio(Protocol):
    """The probability ratio in the surrogate: of each step, of its sequence, ..."""

    def __call__(self, log_ratio: jax.Array, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
        """From the log-ratio of each step, `[S, N]`, to a log-ratio `[S, N]`."""


class Surrogate(Protocol):
    """The objective, to be maximised."""

    def __call__(self, log_ratio: jax.Array, advantage: jax.Array, hyperparams: Hyperparams) -> jax.Array:
        """`[S, N]` log-ratios and advantages, to `[S, N]`."""


class Penalty(Protocol):
    """A cost, to be minimised, already multiplied by its coefficient."""

    def __call__(self, prediction: Prediction, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
        """`[S, N]`."""


class Reduce(Protocol):
    """How much each step weighs in the loss."""

    def __call__(self, mask: jax.Array) -> jax.Array:
        """From the valid steps of a rollout, `[T, B]`, to weights `[T, B]`; the loss is the weighted sum."""


class Critic(Protocol):
    """The loss of the critic's predictions."""

    def __call__(
        self, values: jax.Array, targets: jax.Array, behaviour_values: jax.Array, hyperparams: Hyperparams
    ) -> jax.Array:
        """`[S, N]` each, to `[S, N]`; `behaviour_values` are the predictions during the rollout."""


class Reference(Protocol):
    """How the reference policy moves after an iteration."""

    def __call__(self, reference: PyTree, params: PyTree, iteration: jax.Array, hyperparams: Hyperparams) -> PyTree:
        """The parameters of the next reference policy; `iteration` counts from 1."""


class Reward(Protocol):
    """A change of the rewards before anything is computed from them."""

    def __call__(self, trajectory: Trajectory, kl: jax.Array | None, hyperparams: Hyperparams) -> jax.Array:
        """`[T, B]`; `kl` is the k1 estimate of the KL to the reference, None without one."""


class KLController(Protocol):
    """How the KL coefficient follows the measured KL."""

    def __call__(self, kl_coef: jax.Array, kl: jax.Array, hyperparams: Hyperparams) -> jax.Array:
        """The next coefficient, scalar; `kl` is the mean of the iteration, to the reference if there is one."""


class Algorithm(NamedTuple):
    """The slots: their signatures are above, and what can fill them is in `grpo_jax.objectives` and `baselines`."""

    start: Start  # where rollouts begin, and whether episodes follow each other
    advantage: Advantage
    normalize: Normalize | None  # None leaves the advantages unchanged
    ratio: Ratio
    surrogate: Surrogate
    penalties: tuple[Penalty, ...]
    reduce: Reduce
    critic: Critic | None  # None: no critic exists
    baseline: Baseline | None = None  # values that advantages are relative to; None: the critic's, if it exists
    reference: Reference | None = None  # None: no reference policy exists
    reward: Reward | None = None  # such as kl_penalized_reward; None leaves the rewards unchanged
    # None: the KL coefficient is fixed; tuned(adaptive_coefficient, target="kl_target") holds the KL at a target
    kl_controller: KLController | None = None
    num_branches: int = 0  # rollouts from every state, whose mean return is its value (`monte_carlo_values`); 0: none
    greedy_member: bool = False  # the first member of each group acts greedily; no gradient comes from it
    whole_sequences: bool = False  # minibatches of whole rollouts (S = T) instead of single steps (S = 1)
    live_groups_only: bool = False  # leave out groups whose advantages are all 0, so that no penalty acts on them
    filter_overlong: bool = False  # leave out episodes that a limit cut (DAPO's overlong filtering)
    whole_minibatches: bool = False  # compute the gradient of a minibatch in one piece: a slot compares its samples


def with_reference(
    algorithm: Algorithm,
    reference: Reference = frozen_reference,
    kl: Penalty = kl_to_reference,
) -> Algorithm:
    """The algorithm with a reference policy and a KL penalty to it, in place of any other KL penalty.

    Args:
      algorithm: any.
      reference: `frozen_reference`, `refreshed_reference` or `averaged_reference`.
      kl: `kl_to_reference`, the estimate k3, or `exact_kl_to_reference`.
    """
    others = tuple(penalty for penalty in algorithm.penalties if penalty not in KL_PENALTIES)
    return algorithm._replace(penalties=(kl, *others), reference=reference)


GRPO = Algorithm(
    start=FRESH,
    advantage=outcome(group_normalized),
    normalize=None,
    ratio=step_ratio,
    surrogate=tuned(clipped_surrogate, "clip_low", "clip_high"),
    penalties=(kl_to_behaviour, entropy_bonus),
    reduce=mean_over_steps,
    critic=None,
)
"""Group relative policy optimisation: one-episode groups, outcome supervision, a mean over all valid steps."""

GRPO_PROCESS = GRPO._replace(advantage=process_supervised_advantage)
GRPO_RETURN_TO_GO = GRPO._replace(advantage=return_to_go_advantage, normalize=whiten)
DR_GRPO = GRPO._replace(advantage=outcome(group_centered), reduce=sum_over_horizon)
RLOO = GRPO._replace(advantage=outcome(leave_one_out))
REINFORCE_PLUS_PLUS = GRPO._replace(advantage=whitened(returns_to_go))
REINFORCE_PLUS_PLUS_BASELINE = GRPO._replace(advantage=whitened(outcome(group_centered)))
REMAX = GRPO._replace(advantage=outcome(greedy_baseline, episode_scores, greedy_scores), greedy_member=True)
OPO = GRPO._replace(advantage=outcome(length_weighted, episode_scores, episode_lengths))
PASS_AT_K = GRPO._replace(advantage=outcome(pass_at_k))
GPG = GRPO._replace(advantage=outcome(group_centered), surrogate=tuned(policy_gradient_surrogate))
DAPO = GRPO._replace(penalties=(entropy_bonus,), live_groups_only=True)
GSPO = GRPO._replace(ratio=sequence_ratio, reduce=mean_of_sequence_means, whole_sequences=True)
GMPO = GRPO._replace(
    ratio=geometric_mean_ratio,
    surrogate=tuned(unclipped_surrogate),
    reduce=mean_of_sequence_means,
    whole_sequences=True,
)
CISPO = GRPO._replace(surrogate=tuned(cispo_surrogate, "clip_low", "clip_high"))
SAPO = GRPO._replace(
    surrogate=tuned(sapo_surrogate, tau_positive="sapo_tau_positive", tau_negative="sapo_tau_negative")
)
CLIP_COV = GRPO._replace(ratio=covariance_clipped_ratio, whole_minibatches=True)
KL_COV = GRPO._replace(
    surrogate=tuned(unclipped_surrogate),
    penalties=(covariance_kl, entropy_bonus),
    whole_minibatches=True,
)

PPO = GRPO._replace(
    start=CONTINUE,
    advantage=gae_advantage,
    normalize=whiten,
    penalties=(entropy_bonus,),
    critic=tuned(value_loss, clip="value_clip"),
)
"""Proximal policy optimisation with GAE and a clipped critic."""

KERNEL_GAE = PPO._replace(start=ANCHORED, critic=None, baseline=kernel_baseline(), normalize=scale_by_rms)
"""PPO without a critic: values of states are returns of similar ones in other environments."""
LSTD_GAE = KERNEL_GAE._replace(start=CONTINUE, baseline=lstd_baseline())
"""PPO without a critic network or groups: values are linear in the policy's own features, by least squares."""
RECURSIVE_LSTD_GAE = LSTD_GAE._replace(baseline=recursive_lstd_baseline(), normalize=whiten)
"""PPO without a critic network or groups: values are linear in observations, by least squares on all past rollouts."""
SAME_STEP_GAE = KERNEL_GAE._replace(baseline=same_step_baseline())
SAME_STEP_CRITIC = SAME_STEP_GAE._replace(critic=tuned(value_loss))
"""The critic bootstraps where the window ends, and nowhere else."""
VINE_PPO = KERNEL_GAE._replace(start=FRESH, baseline=None, num_branches=4)
"""PPO without a critic: the value of a state is the mean return of branches from it. GAE's lambda may then be 0."""
STATE_HASH = KERNEL_GAE._replace(advantage=return_minus_value_advantage, baseline=state_hash_baseline())

_TABLE = {
    "grpo": (GRPO, "2402.03300"),
    "grpo_return_to_go": (GRPO_RETURN_TO_GO, "2402.14740"),
    "grpo_process": (GRPO_PROCESS, "2402.03300"),
    "dr_grpo": (DR_GRPO, "2503.20783"),
    "rloo": (RLOO, "2402.14740"),
    "reinforce_plus_plus": (REINFORCE_PLUS_PLUS, "2501.03262"),
    "reinforce_plus_plus_baseline": (REINFORCE_PLUS_PLUS_BASELINE, "2501.03262"),
    "remax": (REMAX, "2310.10505"),
    "opo": (OPO, "2505.23585"),
    "pass_at_k": (PASS_AT_K, "2503.19595"),
    "gpg": (GPG, "2504.02546"),
    "dapo": (DAPO, "2503.14476"),
    "gspo": (GSPO, "2507.18071"),
    "gmpo": (GMPO, "2507.20673"),
    "cispo": (CISPO, "2506.13585"),
    "sapo": (SAPO, "2511.20347"),
    "clip_cov": (CLIP_COV, "2505.22617"),
    "kl_cov": (KL_COV, "2505.22617"),
    "ppo": (PPO, "1707.06347"),
    "kernel_gae": (KERNEL_GAE, "2604.28005"),
    "lstd_gae": (LSTD_GAE, "1705.07461"),
    "recursive_lstd_gae": (RECURSIVE_LSTD_GAE, "1106.0707"),
    "same_step_gae": (SAME_STEP_GAE, "2402.14740"),
    "same_step_critic": (SAME_STEP_CRITIC, "2402.14740"),
    "vine_ppo": (VINE_PPO, "2410.01679"),
    "state_hash": (STATE_HASH, "2505.10978"),
}
ALGORITHMS = {name: algorithm for name, (algorithm, _) in _TABLE.items()}
"""The algorithms by the names that `Config` and the command lines take."""
PAPERS = {name: paper for name, (_, paper) in _TABLE.items()}
"""The paper of each algorithm: identifiers on arxiv.org."""


def by_name(name: str) -> Algorithm:
    """The algorithm of this name, in upper or lower case, with - or _.

    Raises:
      ConfigError: there is no such algorithm; the message has the nearest names.
    """
    found = name.lower().replace("-", "_")
    if found not in ALGORITHMS:
        raise ConfigError(f"unknown algorithm {name!r}: {nearest(found, ALGORITHMS)}")
    return ALGORITHMS[found]


def name_of(algorithm: Algorithm) -> str:
    """The name it has in `ALGORITHMS`, or "custom"."""
    return next((name for name, known in ALGORITHMS.items() if known == algorithm), "custom")

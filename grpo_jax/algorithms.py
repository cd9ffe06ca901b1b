"""Algorithms as values: tuples of pure functions, one for each decision. A variant replaces some of them.

`DR_GRPO = GRPO._replace(advantage=outcome(group_centered), reduce=sum_over_horizon)`
"""

from collections.abc import Callable
from typing import NamedTuple

from grpo_jax.baselines import (
    Baseline,
    gigpo_advantage,
    kernel_baseline,
    same_step_baseline,
    state_hash_baseline,
)
from grpo_jax.errors import ConfigError, nearest
from grpo_jax.groups import ANCHORED, CONTINUE, FRESH, Start
from grpo_jax.objectives import (
    KL_PENALTIES,
    batch_normalized,
    cispo_surrogate,
    clipped_surrogate,
    covariance_clipped_ratio,
    covariance_kl,
    decoupled_normalized,
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
    k2_to_behaviour,
    keep_high_entropy,
    keep_near_behaviour,
    keep_on_policy_sequences,
    keep_within_kl,
    keep_within_total_variation,
    kl_to_behaviour,
    kl_to_reference,
    leave_one_out,
    length_weighted,
    max_rl,
    mean_of_sequence_means,
    mean_of_sequence_sums,
    mean_over_steps,
    optimal_token_baseline_advantage,
    outcome,
    pass_at_k,
    policy_gradient_surrogate,
    process_supervised_advantage,
    return_minus_value_advantage,
    return_to_go_advantage,
    returns_to_go,
    reward_part_judged,
    reward_part_scores,
    reward_part_weights,
    sapo_surrogate,
    scale_by_rms,
    sequence_ratio,
    sequence_token_ratio,
    step_ratio,
    sum_over_horizon,
    truncated_surrogate,
    tuned,
    unbiased_kl_to_reference,
    unclipped_surrogate,
    value_loss,
    vespo_ratio,
    whiten,
    whitened,
)


class Algorithm(NamedTuple):
    """The slots. What can fill them is in `grpo_jax.objectives` and `grpo_jax.baselines`; `hp` are the hyperparameters.

    A rollout has `[T, B]` steps, a minibatch `[S, N]` samples: single steps (S = 1) or whole sequences (S = T).
    """

    start: Start  # where rollouts begin, and whether episodes follow each other
    advantage: Callable  # (trajectory, hp, group_size) -> [T, B], how good a step was beside others; 0 if not valid
    normalize: Callable | None  # (advantage [S, N], mask [S, N]) -> [S, N]; None leaves the advantages unchanged
    ratio: Callable  # (log-ratio [S, N], batch, hp) -> log-ratio [S, N]: of each step, of its sequence, ...
    surrogate: Callable  # (log-ratio [S, N], advantage [S, N], hp) -> [S, N], to be maximised
    penalties: tuple[Callable, ...]  # each (prediction, batch, hp) -> [S, N], a cost times its coefficient
    reduce: Callable  # (mask of valid steps [T, B]) -> weights [T, B]; the loss is the weighted sum
    critic: Callable | None  # (values, targets, behaviour_values, hp) -> loss, each [S, N]; None: no critic exists
    # (prediction, batch, hp) -> [S, N] bool, the steps whose surrogate counts; None: all
    keep: Callable | None = None
    baseline: Baseline | None = None  # values that advantages are relative to; None: the critic's, if it exists
    # (reference parameters, parameters, iteration from 1, hp) -> the next reference's; None: no reference exists
    reference: Callable | None = None
    # (trajectory, k1 estimate of the KL to the reference or None, hp) -> [T, B]; None leaves the rewards unchanged
    reward: Callable | None = None
    # (coefficient, mean KL of the iteration, to the reference if there is one, hp) -> the next KL coefficient; None: it
    # is fixed. tuned(adaptive_coefficient, target="kl_target") holds the KL at a target
    kl_controller: Callable | None = None
    # (coefficient, mean entropy of the iteration, hp) -> the next weight of the entropy bonus, which acts where the
    # last entropy is at most entropy_target; None: it is fixed
    entropy_controller: Callable | None = None
    metrics: tuple[Callable, ...] = ()  # each (trajectory [T, B], batch, hp) -> {"mine/name": scalar, ...}, recorded
    num_branches: int = 0  # rollouts from every state, whose mean return is its value (`monte_carlo_values`); 0: none
    greedy_member: bool = False  # the first member of each group acts greedily; no gradient comes from it
    whole_sequences: bool = False  # minibatches of whole rollouts (S = T) instead of single steps (S = 1)
    live_groups_only: bool = False  # leave out groups whose advantages are all 0, so that no penalty acts on them
    filter_overlong: bool = False  # leave out episodes that a limit cut (DAPO's overlong filtering)
    whole_minibatches: bool = False  # compute the gradient of a minibatch in one piece: a slot compares its samples


SLOT_CALLS = {
    "advantage": "f(trajectory, hyperparams, group_size); for a function of the scores of groups write outcome(f)",
    "normalize": "f(advantage, mask)",
    "ratio": "f(log_ratio, batch, hyperparams)",
    "surrogate": 'f(log_ratio, advantage, hyperparams); tuned(f, "clip_low") passes hyperparameters by name',
    "penalties": "f(prediction, batch, hyperparams), each in a tuple",
    "keep": "f(prediction, batch, hyperparams)",
    "reduce": "f(mask)",
    "critic": 'f(values, targets, behaviour_values, hyperparams); tuned(f, clip="value_clip") passes hyperparameters',
    "reference": "f(reference_params, params, iteration, hyperparams)",
    "reward": "f(trajectory, kl, hyperparams)",
    "kl_controller": 'f(coefficient, kl, hyperparams); tuned(f, target="kl_target") passes hyperparameters by name',
    "metrics": 'f(trajectory, batch, hyperparams) -> {"mine/name": scalar}, each in a tuple',
    "entropy_controller": 'f(coefficient, entropy, hyperparams); tuned(f, target="entropy_target") passes them by name',
}
"""How each slot is called, and the nearest way to write what fills it."""


def with_reference(
    algorithm: Algorithm,
    reference: Callable = frozen_reference,
    kl: Callable = kl_to_reference,
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

GRPO_PER_SEQUENCE = GRPO._replace(reduce=mean_of_sequence_means)
"""As first published: each sequence counts the same, however long."""
_PARTS = reward_part_scores, reward_part_weights, reward_part_judged
GDPO = GRPO._replace(advantage=whitened(outcome(decoupled_normalized, *_PARTS)))
"""For token tasks, whose rewards have parts."""
GSPO_TOKEN = GSPO._replace(ratio=sequence_token_ratio)
LUSPO = GSPO._replace(reduce=mean_of_sequence_sums)
LITE_PPO = GRPO._replace(advantage=outcome(batch_normalized))
TWO_SIDED_CLIP = GRPO._replace(surrogate=tuned(clipped_surrogate, "clip_low", "clip_high", "dual_clip"))
GIGPO = GRPO._replace(advantage=gigpo_advantage())
MAX_RL = GRPO._replace(advantage=outcome(max_rl))
OPTIMAL_TOKEN_BASELINE = GRPO._replace(advantage=optimal_token_baseline_advantage)
IPO = GRPO._replace(
    surrogate=tuned(unclipped_surrogate), penalties=(k2_to_behaviour, entropy_bonus), keep=keep_near_behaviour
)
"""prime-rl's: `clip_low` is the largest change of a probability."""
DPPO_TV = GRPO._replace(surrogate=tuned(truncated_surrogate), keep=keep_within_total_variation)
DPPO_KL = DPPO_TV._replace(keep=keep_within_kl)
VESPO = GRPO._replace(ratio=vespo_ratio, surrogate=tuned(unclipped_surrogate), whole_sequences=True)
DRO = GRPO._replace(surrogate=tuned(policy_gradient_surrogate), penalties=(k2_to_behaviour, entropy_bonus))
HIGH_ENTROPY = GRPO._replace(keep=keep_high_entropy, whole_minibatches=True)
OFF_POLICY_MASK = with_reference(
    GRPO._replace(keep=keep_on_policy_sequences, whole_sequences=True), kl=unbiased_kl_to_reference
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
SAME_STEP_GAE = KERNEL_GAE._replace(baseline=same_step_baseline())
SAME_STEP_CRITIC = SAME_STEP_GAE._replace(critic=tuned(value_loss))
"""The critic bootstraps where the window ends, and nowhere else."""
VINE_PPO = KERNEL_GAE._replace(start=FRESH, baseline=None, num_branches=4)
"""PPO without a critic: the value of a state is the mean return of branches from it. GAE's lambda may then be 0."""
STATE_HASH = KERNEL_GAE._replace(advantage=return_minus_value_advantage, baseline=state_hash_baseline())

_TABLE = {
    "grpo": (GRPO, "2402.03300", "One-episode groups: the return relative to its group's, in standard deviations"),
    "grpo_return_to_go": (
        GRPO_RETURN_TO_GO,
        "2402.14740",
        "Each step by its return-to-go relative to the group's at that step",
    ),
    "grpo_process": (
        GRPO_PROCESS,
        "2402.03300",
        "Rewards within an episode, normalised in the group (process supervision)",
    ),
    "dr_grpo": (DR_GRPO, "2503.20783", "No division by the group's deviation or by the episode's length"),
    "rloo": (RLOO, "2402.14740", "The return minus the mean of the others in the group (leave-one-out)"),
    "reinforce_plus_plus": (REINFORCE_PLUS_PLUS, "2501.03262", "Returns-to-go, whitened over the batch; no groups"),
    "reinforce_plus_plus_baseline": (
        REINFORCE_PLUS_PLUS_BASELINE,
        "2501.03262",
        "Minus the group's mean, then whitened over the batch",
    ),
    "remax": (REMAX, "2310.10505", "The return minus that of a greedy episode"),
    "opo": (OPO, "2505.23585", "Minus the group's mean weighted by episode length"),
    "pass_at_k": (PASS_AT_K, "2503.19595", "The probability that one of k samples succeeds"),
    "gpg": (GPG, "2504.02546", "The plain policy gradient, without a ratio or a clip"),
    "dapo": (DAPO, "2503.14476", "A higher upper clip, no KL, groups without signal left out"),
    "gspo": (GSPO, "2507.18071", "The ratio of the whole sequence"),
    "gmpo": (GMPO, "2507.20673", "The geometric mean of the steps' ratios"),
    "cispo": (CISPO, "2506.13585", "The clipped ratio as a weight, so that every step has a gradient"),
    "sapo": (SAPO, "2511.20347", "A smooth gate in place of the clip"),
    "clip_cov": (CLIP_COV, "2505.22617", "No gradient at steps of high covariance, so that entropy stays"),
    "kl_cov": (KL_COV, "2505.22617", "A KL penalty at steps of high covariance, so that entropy stays"),
    "grpo_per_sequence": (
        GRPO_PER_SEQUENCE,
        "2402.03300",
        "As first published: each sequence counts the same, however long",
    ),
    "gdpo": (GDPO, "2601.05242", "Each part of the reward normalised by itself, for token tasks"),
    "gspo_token": (GSPO_TOKEN, "2507.18071", "The sequence's ratio with the gradient of each step's"),
    "luspo": (LUSPO, "2602.05261", "The sequence's ratio, and a sum over its steps"),
    "lite_ppo": (LITE_PPO, "2508.08221", "Minus the group's mean, divided by the batch's deviation"),
    "two_sided_clip": (TWO_SIDED_CLIP, "2505.07291", "A limit also for bad steps that have become likelier"),
    "gigpo": (GIGPO, "2505.10978", "Compares episodes, and also members that stand in the same state"),
    "max_rl": (MAX_RL, "2602.02710", "The return relative to the group's, divided by the group's mean"),
    "optimal_token_baseline": (OPTIMAL_TOKEN_BASELINE, "2602.07078", "A baseline of least variance at each step"),
    "ipo": (IPO, "2602.04879", "Steps whose probability changed too much are left out; no clip"),
    "dppo_tv": (DPPO_TV, "2602.04879", "A trust region by total variation in place of the clip"),
    "dppo_kl": (DPPO_KL, "2602.04879", "A trust region by KL in place of the clip"),
    "vespo": (VESPO, "2602.10693", "A smooth weight of the sequence's ratio in place of the clip"),
    "dro": (DRO, "2405.19107", "The policy gradient with a squared penalty on the log-ratio"),
    "high_entropy": (HIGH_ENTROPY, "2506.01939", "Only the fifth of the steps with the highest entropy learns"),
    "off_policy_mask": (
        OFF_POLICY_MASK,
        "2512.02556",
        "Bad sequences that have moved far from the behaviour are left out",
    ),
    "ppo": (PPO, "1707.06347", "GAE and a critic; environments continue across rollouts"),
    "kernel_gae": (KERNEL_GAE, "2604.28005", "GAE without a critic: values from similar states of other environments"),
    "same_step_gae": (SAME_STEP_GAE, "2402.14740", "GAE on the group's mean return at the same step"),
    "same_step_critic": (SAME_STEP_CRITIC, "2402.14740", "As same_step_gae, with a critic where the window ends"),
    "vine_ppo": (VINE_PPO, "2410.01679", "Values from rollouts that branch off every state"),
    "state_hash": (STATE_HASH, "2505.10978", "The return minus the mean over visits of the same state"),
}
"""By name: the algorithm, its paper on arxiv.org, and what sets it apart."""
ALGORITHMS = {name: algorithm for name, (algorithm, _, _) in _TABLE.items()}
"""The algorithms by the names that `Config` and the command lines take."""
PAPERS = {name: paper for name, (_, paper, _) in _TABLE.items()}
SENTENCES = {name: sentence for name, (_, _, sentence) in _TABLE.items()}


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


class Choice(NamedTuple):
    """An algorithm and why it was chosen."""

    name: str
    reason: str


def automatic_algorithm(has_prompt: bool) -> Choice:
    """The algorithm for an environment, by whether its episodes begin with a prompt.

    "grpo" for texts, where a critic would be as large as the policy. Otherwise "ppo", whose critic learns from every
    step: it reached every goal of gymnax, of which GRPO missed four. Groups are better where something that no
    observation shows fixes much of the return, which cannot be seen here.
    """
    if has_prompt:
        return Choice("grpo", "on texts a critic would be as large as the policy")
    return Choice("ppo", "a critic learns from every step; try grpo if something hidden fixes much of the return")

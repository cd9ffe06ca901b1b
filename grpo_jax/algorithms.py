"""Algorithms as values: tuples of pure functions, one for each decision. A variant replaces some of them.

`DR_GRPO = GRPO._replace(advantage=outcome(group_centered), reduce=sum_over_horizon)`
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple, get_type_hints

from grpo_jax import baselines, objectives
from grpo_jax.errors import ConfigError, check_arguments, function_name, nearest
from grpo_jax.groups import ANCHORED, CONTINUE, FRESH, Start
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.importing import held_name
from grpo_jax.objectives import entropy_bonus, kl_to_behaviour, outcome, whitened, with_hyperparams


class Algorithm(NamedTuple):
    """The slots, with how each is called. What can fill them is in `grpo_jax.objectives` and `grpo_jax.baselines`.

    A rollout has `[T, B]` steps, a minibatch `[S, N]` samples: single steps (S = 1) or whole sequences (S = T).
    """

    start: Start  # where rollouts begin, and whether episodes follow each other
    # how good a step was beside others; 0 if not valid
    advantage: Annotated[
        Callable, "(trajectory, hyperparams, group_size) -> [T, B]; outcome(f) for f(scores of groups)"
    ]
    normalize: Annotated[Callable | None, "(advantage, mask) -> [S, N]"]  # None leaves the advantages unchanged
    # the log-ratio of each step, of its sequence, ...
    ratio: Annotated[Callable, "(log_ratio, batch, hyperparams) -> log-ratio [S, N]"]
    surrogate: Annotated[Callable, "(log_ratio, advantage, hyperparams) -> [S, N]"]  # to be maximised
    # costs times their coefficients
    penalties: Annotated[tuple[Callable, ...], "(prediction, batch, hyperparams) -> [S, N], each in a tuple"]
    reduce: Annotated[Callable, "(mask) -> weights [T, B]"]  # the loss is the weighted sum over the valid steps
    # None: no critic exists
    critic: Annotated[Callable | None, "(values, targets, behaviour_values, hyperparams) -> loss [S, N]"]
    # the steps whose surrogate counts; None: all
    step_mask: Annotated[Callable | None, "(prediction, batch, hyperparams) -> bool [S, N]"] = None
    # maximised in place of ratio and surrogate, in minibatches of whole groups; it gets each member's log-probability,
    # summed over its steps, and its mean advantage, each [G, K]
    group_surrogate: Annotated[
        Callable | None, "(log_prob, behaviour_log_prob, advantage, valid, hyperparams) -> [G]"
    ] = None
    # values [T, B] that advantages are relative to, and those of the final observations, [F, B]; None: the critic's
    baseline: Annotated[Callable | None, "(trajectory, policy, params, hyperparams, group_size) -> values"] = None
    # the parameters of the reference policy for the next iteration, counted from 1; None: no reference exists
    reference: Annotated[Callable | None, "(reference_params, params, iteration, hyperparams) -> parameters"] = None
    # with the estimate k1 of the KL to the reference, or None; None leaves the rewards unchanged
    reward: Annotated[Callable | None, "(trajectory, kl, hyperparams) -> [T, B]"] = None
    # the next KL coefficient, from the mean KL of the iteration, to the reference if there is one; None: it is fixed
    kl_controller: Annotated[Callable | None, "(coefficient, kl, hyperparams) -> scalar"] = None
    # the next weight of the entropy bonus, which acts where the last entropy is at most entropy_target, of
    # EntropyHyperparams; None: it is fixed
    entropy_controller: Annotated[Callable | None, "(coefficient, entropy, hyperparams) -> scalar"] = None
    # what is recorded beside the metrics of each iteration
    metrics: Annotated[
        tuple[Callable, ...], '(trajectory, batch, hyperparams) -> {"mine/name": scalar}, in a tuple'
    ] = ()
    hyperparams: type[Hyperparams] = Hyperparams  # the class with the numbers that the slots read
    greedy_member: bool = False  # the first member of each group acts greedily; no gradient comes from it
    whole_sequences: bool = False  # minibatches of whole rollouts (S = T) instead of single steps (S = 1)
    live_groups_only: bool = False  # leave out groups whose advantages are all 0, so that no penalty acts on them
    filter_overlong: bool = False  # leave out episodes that a limit cut (DAPO's overlong filtering)
    whole_minibatches: bool = False  # compute the gradient of a minibatch in one piece: a slot compares its samples


def _with_slots(self: Algorithm, /, **slots) -> Algorithm:
    check_arguments("Algorithm", slots, Algorithm._fields)
    for slot, value in slots.items():
        if not isinstance(value, _KINDS[slot]) or (slot in _TUPLES and not all(map(callable, value))):
            raise ConfigError(f"{slot}={function_name(value)} must be {_INSTEAD.get(slot, 'True or False')}")
    return Algorithm(**self._asdict() | slots)


Algorithm._replace = _with_slots  # with an error for what does not fit, and for an unknown slot the one most like it

_HINTS = get_type_hints(Algorithm, include_extras=True)
SLOT_CALLS = {slot: f"f{hint.__metadata__[0]}" for slot, hint in _HINTS.items() if hasattr(hint, "__metadata__")}
"""How each slot that is a function is called."""
_TUPLES = {"penalties": tuple | list, "metrics": tuple | list}
_KINDS = get_type_hints(Algorithm) | _TUPLES | {"hyperparams": type}
_INSTEAD = {slot: f"a function, called as {call}" for slot, call in SLOT_CALLS.items()} | {
    "start": "FRESH, ANCHORED, CONTINUE or forked(8)",
    **{slot: f"a tuple of functions: {slot}=(f,)" for slot in _TUPLES},
    "hyperparams": "a class: class Mine(Hyperparams)",
}


def with_reference(
    algorithm: str | Algorithm,
    reference: Callable = objectives.frozen_reference,
    kl: Callable = objectives.kl_to_reference,
) -> Algorithm:
    """The algorithm with a reference policy and a KL penalty to it, in place of any other KL penalty.

    Args:
      algorithm: any, or its name.
      reference: `frozen_reference`, `refreshed_reference` or `averaged_reference`.
      kl: `kl_to_reference`, the estimate k3, or `exact_kl_to_reference`.
    """
    algorithm = algorithm if isinstance(algorithm, Algorithm) else by_name(str(algorithm))
    others = tuple(penalty for penalty in algorithm.penalties if penalty not in objectives.KL_PENALTIES)
    return algorithm._replace(penalties=(kl, *others), reference=reference)


# Above each algorithm stands where it is not as in its paper. Those made of GRPO keep its clip, its mean over all steps
# and its KL to the behaviour policy, unless they replace them.

_DEVIATION = {"ddof": "score_ddof", "eps": "score_eps"}
# The KL is to the behaviour policy, not to a reference (`with_reference`); the mean is over all steps, not by sequence.
GRPO = Algorithm(
    start=FRESH,
    advantage=outcome(with_hyperparams(objectives.group_normalized, **_DEVIATION)),
    normalize=None,
    ratio=objectives.step_ratio,
    surrogate=with_hyperparams(objectives.clipped_surrogate, "clip_low", "clip_high"),
    penalties=(kl_to_behaviour, entropy_bonus),
    reduce=objectives.mean_over_steps,
    critic=None,
)
"""Group relative policy optimisation: one-episode groups, outcome supervision, a mean over all valid steps."""

_UNCLIPPED = with_hyperparams(objectives.unclipped_surrogate)
_POLICY_GRADIENT = with_hyperparams(objectives.policy_gradient_surrogate)
# The paper compares whole completions.
GRPO_RETURN_TO_GO = GRPO._replace(advantage=objectives.return_to_go_advantage, normalize=objectives.whiten)
GRPO_PROCESS = GRPO._replace(advantage=objectives.process_supervised_advantage)
# The paper has no KL penalty.
DR_GRPO = GRPO._replace(advantage=outcome(objectives.group_centered), reduce=objectives.sum_over_horizon)
# Ratios are clipped, over several epochs; the paper makes one step, with the KL in the reward (kl_penalized_reward).
RLOO = GRPO._replace(advantage=outcome(objectives.leave_one_out))
# The paper's KL is to a reference, in the reward.
REINFORCE_PLUS_PLUS = GRPO._replace(advantage=whitened(objectives.returns_to_go))
# The paper's KL is to a reference.
REINFORCE_PLUS_PLUS_BASELINE = GRPO._replace(advantage=whitened(outcome(objectives.group_centered)))
# Ratios are clipped, and one greedy episode serves a whole group.
_GREEDY = outcome(objectives.greedy_baseline, objectives.episode_scores, objectives.greedy_scores)
REMAX = GRPO._replace(advantage=_GREEDY, greedy_member=True)
# The lead is in standard deviations of the group, as in verl.
PASS_AT_K = GRPO._replace(advantage=outcome(with_hyperparams(objectives.pass_at_k, **_DEVIATION)))
# The paper has no KL penalty, and weighs groups with a signal more where others have none.
GPG = GRPO._replace(advantage=outcome(objectives.group_centered), surrogate=_POLICY_GRADIENT)
# clip_high=0.28 is to be set; dynamic sampling is `num_kept_groups`, overlong filtering `filter_overlong`.
DAPO = GRPO._replace(penalties=(entropy_bonus,), live_groups_only=True)
# The paper's clip widths, 3e-4 and 4e-4, are to be set, as is kl_coef=0.
GSPO = GRPO._replace(ratio=objectives.sequence_ratio, reduce=objectives.mean_of_sequence_means, whole_sequences=True)
# The paper has no KL penalty, and no lower bound of the weight, as with clip_low=1.
CISPO = GRPO._replace(surrogate=with_hyperparams(objectives.cispo_surrogate, "clip_low", "clip_high"))
# The paper averages by sequence.
_TEMPERATURES = {"tau_positive": "sapo_tau_positive", "tau_negative": "sapo_tau_negative"}
_SOFT_GATE = with_hyperparams(objectives.sapo_surrogate, **_TEMPERATURES)
SAPO = GRPO._replace(surrogate=_SOFT_GATE, hyperparams=objectives.SapoHyperparams)
# The KL is to the behaviour policy, not to a reference.
GRPO_PER_SEQUENCE = GRPO._replace(reduce=objectives.mean_of_sequence_means)
_PARTS = objectives.reward_part_scores, objectives.reward_part_weights, objectives.rewarded_parts
_BY_PART = with_hyperparams(objectives.decoupled_normalized, **_DEVIATION)
GDPO = GRPO._replace(advantage=whitened(outcome(_BY_PART, *_PARTS)))
GSPO_TOKEN = GSPO._replace(ratio=objectives.sequence_token_ratio)
LUSPO = GSPO._replace(reduce=objectives.mean_of_sequence_sums)
# The paper has no KL penalty.
LITE_PPO = GRPO._replace(advantage=outcome(with_hyperparams(objectives.batch_normalized, **_DEVIATION)))
# The paper's KL is to a reference.
TWO_SIDED_CLIP = GRPO._replace(
    surrogate=with_hyperparams(objectives.clipped_surrogate, "clip_low", "clip_high", "dual_clip"),
    hyperparams=objectives.DualClipHyperparams,
)
# The paper's KL is to a reference.
GIGPO = GRPO._replace(advantage=baselines.gigpo_advantage(), hyperparams=baselines.GigpoHyperparams)
# The advantage alone is the paper's.
MAX_RL = GRPO._replace(advantage=outcome(objectives.max_rl))
# It is prime-rl's variant; clip_low=0.3, the largest change of a probability, is to be set.
IPO = GRPO._replace(surrogate=_UNCLIPPED, penalties=(entropy_bonus,), step_mask=objectives.keep_near_behaviour)
# The paper learns values, from given data; here the members of a group are compared, on their own data.
DRO = GRPO._replace(surrogate=_POLICY_GRADIENT, penalties=(objectives.k2_to_behaviour, entropy_bonus))
# As in the paper, whose optimiser is Muon.
TPO = GRPO._replace(
    group_surrogate=with_hyperparams(objectives.target_policy_surrogate, temperature="tpo_temperature"),
    penalties=(entropy_bonus,),
    reduce=objectives.mean_of_sequence_means,
    hyperparams=objectives.TpoHyperparams,
)
# The paper's is a variant of DAPO.
HIGH_ENTROPY = GRPO._replace(step_mask=objectives.keep_high_entropy, whole_minibatches=True)
# Of the paper's changes to GRPO it has this mask and the estimate of the KL.
OFF_POLICY_MASK = with_reference(
    GRPO._replace(step_mask=objectives.keep_on_policy_sequences, whole_sequences=True),
    kl=objectives.unbiased_kl_to_reference,
)
# Advantages are whitened and values clipped, as in implementations, not in the paper.
PPO = GRPO._replace(
    start=CONTINUE,
    advantage=objectives.gae_advantage,
    normalize=objectives.whiten,
    penalties=(entropy_bonus,),
    critic=with_hyperparams(objectives.value_loss, clip="value_clip"),
)
"""Proximal policy optimisation with GAE and a clipped critic."""
_GROUP_GAE = PPO._replace(start=ANCHORED, critic=None, normalize=objectives.scale_by_rms)
# The paper's estimator is a relative; this one has GAE, and groups that meet again.
KERNEL_GAE = _GROUP_GAE._replace(baseline=baselines.kernel_baseline, hyperparams=baselines.KernelHyperparams)
"""PPO without a critic: values of states are returns of similar ones in other environments."""
# The paper compares whole completions.
SAME_STEP_GAE = _GROUP_GAE._replace(baseline=baselines.same_step_baseline)
# As of SAME_STEP_GAE; the critic bootstraps where the window ends, and nowhere else.
SAME_STEP_CRITIC = SAME_STEP_GAE._replace(critic=with_hyperparams(objectives.value_loss))

_TABLE = {
    "grpo": (GRPO, "2402.03300", "One-episode groups: the return relative to its group's, in standard deviations"),
    "grpo_return_to_go": (GRPO_RETURN_TO_GO, "2402.14740", "Each return-to-go relative to the group's at that step"),
    "grpo_process": (GRPO_PROCESS, "2402.03300", "Process supervision: rewards of steps, normalised in the group"),
    "dr_grpo": (DR_GRPO, "2503.20783", "No division by the group's deviation or by the episode's length"),
    "rloo": (RLOO, "2402.14740", "The return minus the mean of the others in the group (leave-one-out)"),
    "reinforce_plus_plus": (REINFORCE_PLUS_PLUS, "2501.03262", "Returns-to-go, whitened over the batch; no groups"),
    "reinforce_plus_plus_baseline": (REINFORCE_PLUS_PLUS_BASELINE, "2501.03262", "Less the group's mean, whitened"),
    "remax": (REMAX, "2310.10505", "The return minus that of a greedy episode"),
    "pass_at_k": (PASS_AT_K, "2503.19595", "The probability that one of k samples succeeds"),
    "gpg": (GPG, "2504.02546", "The plain policy gradient, without a ratio or a clip"),
    "dapo": (DAPO, "2503.14476", "A higher upper clip, no KL, groups without signal left out"),
    "gspo": (GSPO, "2507.18071", "The ratio of the whole sequence"),
    "cispo": (CISPO, "2506.13585", "The clipped ratio as a weight, so that every step has a gradient"),
    "sapo": (SAPO, "2511.20347", "A smooth gate in place of the clip"),
    "grpo_per_sequence": (GRPO_PER_SEQUENCE, "2402.03300", "As first published: all sequences count the same"),
    "gdpo": (GDPO, "2601.05242", "Each part of the reward normalised by itself, for token tasks"),
    "gspo_token": (GSPO_TOKEN, "2507.18071", "The sequence's ratio with the gradient of each step's"),
    "luspo": (LUSPO, "2602.05261", "The sequence's ratio, and a sum over its steps"),
    "lite_ppo": (LITE_PPO, "2508.08221", "Minus the group's mean, divided by the batch's deviation"),
    "two_sided_clip": (TWO_SIDED_CLIP, "2505.07291", "A limit also for bad steps that have become likelier"),
    "gigpo": (GIGPO, "2505.10978", "Compares episodes, and also members that stand in the same state"),
    "max_rl": (MAX_RL, "2602.02710", "The return relative to the group's, divided by the group's mean"),
    "ipo": (IPO, "2602.04879", "Steps whose probability changed too much are left out; no clip"),
    "dro": (DRO, "2405.19107", "The policy gradient with a squared penalty on the log-ratio"),
    "tpo": (TPO, "2604.06159", "Fits the probabilities of a group's members to a target, by cross-entropy"),
    "high_entropy": (HIGH_ENTROPY, "2506.01939", "Only the fifth of the steps with the highest entropy learns"),
    "off_policy_mask": (OFF_POLICY_MASK, "2512.02556", "Bad sequences far from the behaviour policy are left out"),
    "ppo": (PPO, "1707.06347", "GAE and a critic; environments continue across rollouts"),
    "kernel_gae": (KERNEL_GAE, "2604.28005", "GAE without a critic: values from similar states of other environments"),
    "same_step_gae": (SAME_STEP_GAE, "2402.14740", "GAE on the group's mean return at the same step"),
    "same_step_critic": (SAME_STEP_CRITIC, "2402.14740", "As same_step_gae, with a critic where the window ends"),
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
    if found in ("dqn", "double_dqn", "c51", "rainbow", "ddpg", "td3", "sac", "dpo"):
        raise ConfigError(f"{name!r} learns from stored data; there are no such (off-policy) algorithms here, try ppo")
    if found not in ALGORITHMS:
        raise ConfigError(f"unknown algorithm {name!r}: {nearest(found, ALGORITHMS)}")
    return ALGORITHMS[found]


def name_of(algorithm: Algorithm) -> str:
    """Its name in `ALGORITHMS`; of a custom one the import path under which a module holds it, or what sets it apart.

    Such as "ppo", "my_algorithms:MINE" (in a script or a notebook "MINE"), "ppo with advantage=my_algorithms:mine".
    """
    known = next((name for name, each in ALGORITHMS.items() if each == algorithm), None)
    return known or held_name(algorithm) or _as_variant(algorithm)


def _as_variant(algorithm: Algorithm) -> str:
    def changes(name):
        return {slot: value for slot, value in algorithm._asdict().items() if value != getattr(ALGORITHMS[name], slot)}

    def shown(value):
        names = [function_name(each) for each in value if callable(each)] if isinstance(value, tuple) else ()
        return f"({', '.join(names)})" if names else function_name(value)

    nearest_name = min(ALGORITHMS, key=lambda name: len(changes(name)))
    return f"{nearest_name} with " + ", ".join(f"{slot}={shown(each)}" for slot, each in changes(nearest_name).items())


def algorithms_with(name: str) -> list[str]:
    """The algorithms that have a hyperparameter which `Hyperparams` lacks."""
    if name in Hyperparams.__dataclass_fields__:
        return []
    return [each for each, algorithm in ALGORITHMS.items() if name in algorithm.hyperparams.__dataclass_fields__]


def automatic_algorithm(has_prompt: bool) -> tuple[str, str]:
    """The name of the algorithm for an environment, by whether its episodes begin with a prompt, and the reason.

    Where there is no prompt, PPO reached every goal of gymnax, of which GRPO missed four.
    """
    if has_prompt:
        return "grpo", "on texts a critic would be as large as the policy"
    return "ppo", "a critic learns from every step; try grpo if something hidden fixes much of the return"

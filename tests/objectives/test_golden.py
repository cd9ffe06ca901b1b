"""All golden cases of seven published trainers, through the public functions. See `golden/README.md`.

A test has the cases of one published function, compiled as one program. "On purpose" marks where ours differs.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import objectives as o
from grpo_jax.baselines import same_state_advantage

FOLDER = Path(__file__).parents[1] / "golden"
FILES = [np.load(FOLDER / f"{name}.npz") for name in ("reference_implementations", "golden_2")]


def read(file):
    """(name of a case, its arrays, time-major where they are matrices, its settings) of each case of a file."""
    found = {}
    for path in file.files:
        case, _, name = path.rpartition("/")
        found.setdefault(case, {})[name] = file[path].T
    return [(case, arrays, json.loads(str(arrays.pop("settings")))) for case, arrays in sorted(found.items())]


def kind_of(case):
    """The trainer and its function."""
    return "/".join(case.split("/")[:2])


def without_meaning(case, x, s):
    """Why the library has nothing to compare with a case, or None."""
    part_lengths = np.unique(x["index"], return_counts=True)[1] if "gdpo" in case else [1]
    missing = [np.isnan(x[name]).any() for name in ("rewards_per_func", "rewards_per_objective") if name in x]
    weights = {"rollout_is_weights", "sampler_is_weights", "importance_sampling_ratio"} & x.keys()
    if (weights and "loss_" in case) or s.get("use_rollout_is_weights") or kind_of(case) in OF_A_SAMPLER:
        return "the sampler is another program there; here the policy that acts is the one that is trained"
    if any(missing) or len({*part_lengths}) > 1:
        return "a reward that does not apply is 0 here, not NaN, and groups have one size"
    return next((why for name, why in UNKNOWN.items() if case.startswith(name)), None)


OF_A_SAMPLER = {
    *("trl/sampler_ratio", "trl/loss_sampler_correction", "trl/loss_vespo_sampler", "verl/rejection_mask"),
    *("verl/loss_gspo_rollout_weights", "verl/loss_geo_mean_rollout_weights"),
    *(f"verl/loss_bypass_{k}" for k in range(6)),
}
NOT_HERE = "verl/loss_clip_cov verl/loss_kl_cov verl/optimal_token verl/tir_optimal_token verl/loss_dppo".split()
NOT_HERE += "verl/opo verl/loss_geo_mean prime_rl/loss_dppo prime_rl/loss_ref_kl".split()
NOT_HERE += "trl/loss_gmpo trl/loss_vespo trl/vespo_weights".split()
UNKNOWN = {
    "trl/loss_luspo/token": "masked steps enter that loss, which they never do here",
    "prime_rl/grpo_length_penalty": "no length penalty of this form in the library",
    "prime_rl/rae": "no roles of self-play in the library",
    **dict.fromkeys(NOT_HERE, "not in the library"),
}
ALL = [read(file) for file in FILES]
CASES = {}  # by kind, those with a meaning
for place, cases in enumerate(ALL):
    for case, x, s in cases:
        if not without_meaning(case, x, s):
            # The two files have cases of one function of different versions.
            CASES.setdefault(f"{kind_of(case)}@{place}", []).append((case, x, s))


def of_kinds(kinds):
    return pytest.mark.parametrize("kind", [kind for kind in CASES if kind.partition("@")[0] in kinds])


def test_every_case_is_covered():
    assert [len(cases) for cases in ALL] == [102, 292]
    assert sum(map(len, CASES.values())) == 256
    kinds = {kind.partition("@")[0] for kind in CASES}
    assert kinds == LOSSES | ADVANTAGES.keys() | OTHERS.keys() | {"verl/value_loss"}


def assert_close(actual, expected, tolerance=2e-6, case=""):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance, err_msg=case)


# --- losses ----------------------------------------------------------------------------------------------------------


def all_rows(mask, s):
    """TRL's row mean counts rows without a valid step."""
    return mask / jnp.maximum(mask.sum(0, keepdims=True), 1.0) / mask.shape[1]


def of_modes(modes, weights):
    return dict.fromkeys(modes.split(), weights)


# The weights of the published aggregations: those of a reduction, or a given count in the place of its own.
AGGREGATIONS = {
    **of_modes("dapo cispo", lambda mask, s: mask / max(s["num_items_in_batch"], 1)),
    **of_modes("token-mean token bnpo", lambda mask, s: o.mean_over_steps(mask)),
    **of_modes("grpo sapo", all_rows),
    **of_modes("seq-mean-token-mean seq sequence-mean-token-mean", lambda mask, s: o.mean_of_sequence_means(mask)),
    "dr_grpo": lambda mask, s: o.sum_over_horizon(mask, horizon=s["max_completion_length"]),
    "luspo": lambda mask, s: mask / mask.shape[1],  # row means times lengths; rows without a valid step count
    "seq-mean-token-sum": lambda mask, s: o.mean_of_sequence_sums(mask),
    "sequence-mean-token-scale": lambda mask, s: o.mean_of_sequence_sums(mask) / mask.shape[0],
    # On purpose: ours divides by the number of sequences too, as the Dr. GRPO paper does.
    "seq-mean-token-sum-norm": lambda mask, s: o.sum_over_horizon(mask) * mask.shape[1],
    "sequence-mean-token-sum-norm": lambda mask, s: o.sum_over_horizon(mask, horizon=1.0),
    "token-sum": lambda mask, s: mask,
}


def weights(kind, mask, s):
    mask, mode = mask.astype(float), s.get("loss_agg_mode", s.get("loss_avg_mode", s.get("loss_type")))
    if kind in ALWAYS_SEQUENCES:
        return o.mean_of_sequence_means(mask)
    if "scale" in s:
        return mask / s["scale"]
    if kind == "verl/loss_vanilla_global":
        rows = s["global_batch_size"] * (s["loss_scale_factor"] or mask.shape[0])
        return mask * s["dp_size"] / (s["batch_num_tokens"] if mode == "token-mean" else rows)
    return AGGREGATIONS[mode](mask, s)


def clip_of(s):
    low = s.get("clip_ratio_low") or s.get("clip_ratio", s.get("epsilon"))
    high = s.get("clip_ratio_high") or s.get("epsilon_high") or s.get("clip_ratio", s.get("epsilon"))
    return {"clip_low": low, "clip_high": high}


ALWAYS_SEQUENCES = {"verl/loss_gspo", "verl/loss_sapo"}  # whatever mode is asked for
LEVELS = dict.fromkeys(("verl/loss_gspo", "easyr1/loss_gspo_token"), "sequence_token")
LEVELS["easyr1/loss_gspo"] = "sequence"


def leveled(kind, d, mask, s):
    level = "sequence_token" if s.get("loss_algo") == "gspo-token" else LEVELS.get(kind, "token")
    level = s.get("importance_sampling_level", level)
    levels = {"sequence": o.sequence_log_ratio, "sequence_token": o.sequence_token_log_ratio}
    return levels[level](d, mask) if level in levels else d


def valued(surrogate, d, a, b):
    """A surrogate `weight * A * d` with the value of `weight * A * log pi`, as it is published."""
    slope = jax.grad(lambda d: jnp.sum(surrogate(d, a)))(d)
    return surrogate(d, a) + jax.lax.stop_gradient(slope) * b


def objective(kind, p, a, x, mask, s):
    """The published objective before the penalties, composed from the public functions."""
    d, b = p - x["old_log_prob"], x["old_log_prob"]
    match "loss_sapo" if s.get("loss_type") == "sapo" else kind.split("/")[1]:
        case "loss_ipo":
            return o.unclipped_surrogate(d, s["adv_tau"] * a) * o.near_behaviour(p, b, limit=s["ipo_threshold"])
        case "loss_dro":
            return o.policy_gradient_surrogate(p, a) - s["dro_beta"] * o.k2(p, b)
        case "loss_sapo":
            high = s.get("tau_pos", s.get("tau_positive", s.get("sapo_temperature_pos")))
            low = s.get("tau_neg", s.get("tau_negative", s.get("sapo_temperature_neg")))
            return o.sapo_surrogate(d, a, tau_positive=high, tau_negative=low)
        case "loss_cispo":
            clip = {"clip_low": 1.0, "clip_high": s["epsilon_high"] - 1.0} if "epsilon_high" in s else clip_of(s)
            return valued(functools.partial(o.cispo_surrogate, **clip), d, a, b)
        case "loss_gpg":
            return o.policy_gradient_surrogate(p, a)
    if s.get("loss_algo") == "gspo-token":  # on purpose: theirs clamps each step too, ours only the ratio
        d = d + jax.lax.stop_gradient(jnp.clip(d, -20, 20) - d)
    dual = s.get("delta") or s.get("epsilon_c") or s.get("clip_ratio_dual")
    if kind in ("verl/loss_clip", "verl/loss_vanilla_global"):
        dual = s.get("clip_ratio_c")
    return o.clipped_surrogate(leveled(kind, d, mask, s), a, dual_clip=dual, **clip_of(s))


def loss_and_gradients(kind, x, s):
    """The loss, and its gradients in the log-probabilities and the entropies."""
    mask = x["response_mask"].astype(bool)
    a = jnp.broadcast_to(x.get("advantages", 0.0), mask.shape)

    def loss(p, entropy):
        d, each = p - x["old_log_prob"], objective(kind, p, a, x, mask, s)
        if s.get("top_entropy_quantile", 1) < 1:
            each = each * o.high_entropy(entropy, mask, fraction=s["top_entropy_quantile"])
        if "off_policy_mask_threshold" in s:
            limit = s["off_policy_mask_threshold"]
            each = each * o.on_policy_sequences(p, x["sampling_log_prob"], a, mask, limit=limit)
        cost, beta = -each, s.get("beta") or 0.0
        if beta:
            estimate = {"kl": o.k1, "mse_kl": o.k2}.get(s.get("kl_loss_mode"), o.k3)
            kl = estimate(p, x["ref_log_prob"])
            if estimate is o.k2:  # on purpose: ours clamps the log-ratio, which passes 20 in one step of one case
                far = p - x["ref_log_prob"]
                kl += 0.5 * (jnp.square(far) - jnp.square(jnp.clip(far, -20, 20)))
            if "kl_clamp_value" in s:
                kl = jnp.clip(kl, -s["kl_clamp_value"], s["kl_clamp_value"])
            ratio = o.importance_ratio(leveled(kind, d, mask, s)) if s.get("use_bias_correction_kl") else 1.0
            cost += beta * kl * ratio
        if "scale" in s:
            cost += s.get("kl_tau", 1e-3) * 2 * o.k2(p, x["old_log_prob"])
        total = o.weighted_sum(cost, weights(kind, mask, s) * x.get("loss_weights", 1.0))
        if "entropy_coef" in s:
            count = s.get("num_items_in_batch")
            per = mask / count if count else o.mean_over_steps(mask)
            if s.get("top_entropy_quantile", 1) < 1:
                per = o.mean_over_steps(o.high_entropy(entropy, mask, fraction=s["top_entropy_quantile"]))
            total -= s["entropy_coef"] * o.weighted_sum(entropy, per)
        return total

    return jax.value_and_grad(loss, argnums=(0, 1))(x["log_prob"], x.get("entropies", jnp.zeros(mask.shape)))


LOSSES = {kind.partition("@")[0] for kind in CASES if "/loss_" in kind}


@of_kinds(LOSSES)
def test_losses(kind):
    cases = CASES[kind]
    given = [x | ({"advantages": x["advantages"].T} if is_transposed(x) else {}) for _, x, _ in cases]
    of_case = [functools.partial(loss_and_gradients, kind_of(case), s=s) for case, _, s in cases]
    results = jax.jit(lambda xs: [f(x) for f, x in zip(of_case, xs, strict=True)])(given)
    for (case, x, _), (value, gradients) in zip(cases, results, strict=True):
        assert_close(value, x["loss"], 3e-6, case)
        assert_close(gradients[0], x["grad_log_prob"], 1e-5, case)
        if "grad_entropies" in x:
            assert_close(gradients[1], x["grad_entropies"], 1e-5, case)


def is_transposed(x):
    return np.ndim(x.get("advantages", 0.0)) == 2 and x["advantages"].shape != x["log_prob"].shape


def test_clipped_value_loss():
    for case, x, s in CASES["verl/value_loss@0"]:
        constants = x["returns"], x["values"], jnp.asarray(x["response_mask"])

        def loss(values, clip=s["cliprange_value"], constants=constants):
            *given, mask = constants
            return o.weighted_sum(o.value_loss(values, *given, clip=clip), o.mean_over_steps(mask))

        value, gradient = jax.jit(jax.value_and_grad(loss))(x["vpreds"])
        assert_close(value, x["loss"], case=case)
        assert_close(gradient, x["grad_vpreds"], 1e-5, case)


# --- advantages ------------------------------------------------------------------------------------------------------

# Compiled, as operation by operation takes longer.
BY_DDOF = o.whiten, o.group_normalized, o.pass_at_k, o.decoupled_normalized
whiten, group_normalized, pass_at_k, decoupled_normalized = (jax.jit(f, static_argnames="ddof") for f in BY_DDOF)
group_centered, leave_one_out, max_rl = map(jax.jit, (o.group_centered, o.leave_one_out, o.max_rl))
discounted_returns, gae = map(jax.jit, (o.discounted_returns, o.gae))
same_state = jax.jit(same_state_advantage, static_argnums=3, static_argnames=("normalize", "ddof"))


def grouped(x, index):
    """`[..., num_groups, group_size]` of `[..., B]`, for groups of one size."""
    return np.asarray(x).reshape(*np.shape(x)[:-1], len(np.unique(index)), -1)


def of_groups(formula):
    def result(x, s):
        scores = x["scores"] if "scores" in x else x["token_level_rewards"].sum(0)
        parts = [np.asarray(formula(scores[x["index"] == g][None], s)).ravel() for g in np.unique(x["index"])]
        return np.concatenate(parts) * x.get("response_mask", np.ones(()))

    return result


def alone_or(formula, alone):
    """A group of one is compared with nothing: an error here, a convention there."""
    return of_groups(lambda r, s: formula(r, s) if r.size > 1 else alone(r, s))


def trl_scaled(x, s):
    rewards = x["rewards_per_func"]
    scores = grouped((np.asarray(s["reward_weights"])[:, None] * rewards).sum(0), x["index"])
    match s["scale_rewards"]:
        case "group":
            return group_normalized(scores, eps=1e-4, ddof=1).ravel()
        case "none":
            return group_centered(scores).ravel()
    # Theirs divides by the spread of the scores, ours (Lite PPO's) by that of the centred ones.
    return (group_centered(scores) / (scores.std(ddof=1) + 1e-4)).ravel()


def gdpo(x, s, part_eps, **white):
    name = "rewards_per_func" if "rewards_per_func" in x else "rewards_per_objective"
    w, parts = jnp.asarray(s["reward_weights"] or np.ones(len(x[name])), jnp.float32), grouped(x[name], x["index"])
    if s.get("norm_adv_by_std_in_grpo") is False:
        summed = group_centered(jnp.tensordot(w, parts, 1)).reshape(1, -1)
    else:
        summed = decoupled_normalized(jnp.asarray(parts), w, eps=part_eps, ddof=1).reshape(1, -1)
    mask = x.get("response_mask", np.ones((1, summed.size)))
    return whiten(jnp.broadcast_to(summed, mask.shape), jnp.asarray(mask), ddof=1, **white)


def gigpo(x, s):
    """Rows are steps: laid out as [T, N], the rollouts of a group side by side, the missing ones invalid."""
    group_of = dict(zip(x["trajectory"], x["index"], strict=True))
    members = [[t for t in group_of if group_of[t] == g] for g in sorted({*group_of.values()})]
    size = max(map(len, members))
    column = {t: k * size + i for k, group in enumerate(members) for i, t in enumerate(group)}
    at = x["env_step"].astype(int), np.array([column[t] for t in x["trajectory"]])

    def laid_out(values, dtype=np.float32):
        array = np.zeros((int(x["env_step"].max()) + 1, size * len(members)), dtype)
        array[at] = values
        return jnp.asarray(array)

    valid, returns, state = laid_out(True, bool), laid_out(x["step_returns"]), laid_out(x["anchor_state"], np.int32)
    ended = last_valid(np.asarray(valid, int))
    found = np.asarray(discounted_returns(laid_out(x["env_rewards"]), ended, discount=s["gamma"]))
    assert_close(found[at], x["step_returns"])
    normalize, episode = s["mode"] == "mean_std_norm", {}
    step = same_state(returns, state, valid, size, normalize=normalize, ddof=1)
    for group in members:
        r = np.float32([[x["token_level_rewards"][:, x["trajectory"] == t].sum(0)[0] for t in group]])
        if len(group) > 1:
            r = group_normalized(r, ddof=1) if normalize else group_centered(r)
        elif normalize:
            r = r / (1 + 1e-6)
        episode |= dict(zip(group, np.asarray(r)[0], strict=True))
    total = np.array([episode[t] for t in x["trajectory"]]) + s["step_advantage_w"] * np.asarray(step)[at]
    return total * x["response_mask"]


def gpg(x, s):
    rewards = x["token_level_rewards"].sum(0)
    alpha = rewards.size / max((rewards != 0).sum(), 1)  # theirs; ours leaves the scale to the learning rate
    return alpha / s["f_norm"] * alone_or(lambda r, s: group_centered(r), lambda r, s: r)(x, s)


def of_first(formula):
    """Of the first file, where no score of group 0 differs: on purpose exactly 0, which the published mean misses."""

    def result(x, s):
        scores = grouped(x["token_level_rewards"].sum(0), x["index"])
        advantages = np.asarray(formula(scores))
        np.testing.assert_array_equal(advantages[0], 0.0)
        return advantages.reshape(1, -1) * x["response_mask"]

    return result


def last_valid(mask):
    return (mask == 1) & (np.concatenate([mask[1:], np.zeros_like(mask[:1])]) == 0)


def reinforce_plus_plus(x, s):
    mask = x["response_mask"]
    returns = np.asarray(discounted_returns(x["token_level_rewards"], last_valid(mask), discount=s["gamma"]))
    assert_close(returns * mask, x["returns"] * mask)
    return whiten(returns, mask, ddof=1)


def reinforce_plus_plus_baseline(x, s):
    centred = group_centered(grouped(x["token_level_rewards"].sum(0), x["index"])).reshape(1, -1)
    return whiten(np.broadcast_to(centred, x["response_mask"].shape), x["response_mask"], ddof=1)


def remax(x, s):
    """Every rollout has its own greedy score: groups of one."""
    scores = jnp.asarray(x["token_level_rewards"].sum(0))[:, None]
    return o.greedy_baseline(scores, jnp.asarray(x["reward_baselines"])).reshape(1, -1) * x["response_mask"]


def whitened_gae(x, s):
    valid, values = x["response_mask"] == 1, x["values"]
    ended = last_valid(x["response_mask"])
    next_values = np.concatenate([values[1:], np.full_like(values[:1], np.nan)])  # ignored: all end before
    trace = {"discount": s["gamma"], "gae_lambda": s["lam"]}
    result = np.asarray(gae(x["token_level_rewards"], values, next_values, ended, np.zeros_like(ended), **trace))
    assert_close((result + values)[valid], x["returns"][valid])
    whitened = np.asarray(whiten(result, x["response_mask"], ddof=1))
    np.testing.assert_array_equal(whitened[~valid], 0.0)  # on purpose: theirs is -mean / std there
    return np.where(valid, whitened, x["advantages"])


# The published trainers take the unbiased standard deviation; our default, as the papers', is the population's.
FIRST = {
    "grpo": of_first(lambda scores: group_normalized(scores, ddof=1)),
    "dr_grpo": of_first(group_centered),
    "rloo": of_first(leave_one_out),
    "grpo_passk": of_first(lambda scores: pass_at_k(scores, ddof=1)),
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "gae": whitened_gae,
}
ADVANTAGES = {
    **{
        kind.partition("@")[0]: FIRST[kind.split("/")[1][:-2]]
        for kind in CASES
        if kind.split("/")[1][:-2] in FIRST and kind[-1] == "0"
    },
    "trl/scale_rewards": trl_scaled,
    "trl/gdpo_normalize_then_sum": lambda x, s: np.ravel(gdpo(x, s, 1e-4, eps=1e-4)),
    "verl/gdpo": lambda x, s: gdpo(x, s, 1e-6),
    "verl/grpo_vectorized": alone_or(
        lambda r, s: group_normalized(r, ddof=1) if s["norm_adv_by_std_in_grpo"] else group_centered(r),
        lambda r, s: r / (1 + 1e-6) if s["norm_adv_by_std_in_grpo"] else r,
    ),
    "verl/rloo_vectorized": alone_or(lambda r, s: leave_one_out(r), lambda r, s: 0 * r),
    "verl/gpg": gpg,
    "tunix/grpo": of_groups(lambda r, s: group_normalized(r, ddof=1)),
    "tunix/rloo": of_groups(lambda r, s: leave_one_out(r)),
    "tunix/drgrpo": of_groups(lambda r, s: group_centered(r)),
    "prime_rl/max_rl": alone_or(lambda r, s: max_rl(r), lambda r, s: 0 * r),
    "verl_agent/gigpo": gigpo,
}


@of_kinds(ADVANTAGES)
def test_advantages(kind):
    for case, x, s in CASES[kind]:
        result = ADVANTAGES[kind_of(case)](x, s)
        assert_close(np.asarray(result), x["advantages"], 1e-5, case)


# --- masks, divergences and coefficients -----------------------------------------------------------------------------


def adaptive_entropy(x, s):
    n, coefficient, after = s["micro_batches_per_update"], s["entropy_coef"], []
    entropy, mask = x["entropies"].T, x["response_mask"].T
    names = {"target": "target", "step": "coef_delta", "low": "coef_min", "high": "coef_max"}
    options = {name: s[f"entropy_{theirs}"] for name, theirs in names.items()}
    for k in range(1, len(mask) + 1):
        if k % n == 0:
            mean = (entropy[k - n : k] * mask[k - n : k]).sum() / mask[k - n : k].sum()
            coefficient = o.adaptive_entropy_coefficient(coefficient, mean, **options)
        after.append(float(coefficient))
    return after


def k3_straight_through(p, q):
    """The value of k3, cut at 10 as theirs, with the gradient of k2."""
    return o.k2(p, q) + jax.lax.stop_gradient(jnp.clip(o.k3(p, q), -10, 10) - o.k2(p, q))


KL = {
    "kl": o.k1,
    "abs": lambda p, q: jnp.abs(o.k1(p, q)),
    "mse": o.k2,
    "low_var_kl": o.k3,
    "k1+": o.k2_straight_through,
}
KL |= dict.fromkeys(("k3+", "low_var_kl+"), k3_straight_through)
OTHERS = {
    "trl/high_entropy_mask": ("keep", lambda x, s: o.high_entropy(
        x["entropies"], x["response_mask"], fraction=s["top_entropy_quantile"])),
    "trl/off_policy_mask": ("keep", lambda x, s: o.on_policy_sequences(
        x["log_prob"], x["sampling_log_prob"], x["advantages"], x["response_mask"],
        limit=s["off_policy_mask_threshold"])[0]),
    "trl/adaptive_entropy": ("entropy_coef_after", adaptive_entropy),
    **{f"verl/kl_{name}": ("kl", lambda x, s, f=f: f(x["log_prob"], x["ref_log_prob"])) for name, f in KL.items()},
}  # fmt: skip


@of_kinds(OTHERS)
def test_masks_divergences_and_coefficients(kind):
    name, function = OTHERS[kind.partition("@")[0]]
    for case, x, s in CASES[kind]:
        compiled = functools.partial(function, s=s)
        if name != "entropy_coef_after":  # a number of the host
            compiled = jax.jit(compiled)
        assert_close(np.asarray(compiled(x)), x[name], 2e-6 if name == "kl" else 1e-5, case)
        if "grad_of_masked_sum" in x:
            of_sum = jax.grad(lambda p, x=x, f=compiled: jnp.sum(f(x | {"log_prob": p}) * x["response_mask"]))
            assert_close(jax.jit(of_sum)(x["log_prob"]), x["grad_of_masked_sum"], 1e-5, case)

"""All golden cases of two published trainers, through the public functions. See `golden/README.md`."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import objectives

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "reference_implementations.npz")
CASES = sorted({name.rsplit("/", 1)[0] for name in GOLDEN.files})


def load(case):
    """The arrays of a case, time-major, and its settings."""
    arrays = {name.rsplit("/", 1)[1]: GOLDEN[name] for name in GOLDEN.files if name.startswith(case + "/")}
    settings = json.loads(str(arrays.pop("settings")))
    return {name: value.T for name, value in arrays.items()}, settings


def cases(*functions):
    return pytest.mark.parametrize("case", [c for c in CASES if c.split("/")[1] in functions])


def test_every_case_is_covered():
    covered = [c for mark in COVERED for c in mark.args[1]]
    assert sorted(covered) == CASES and len(CASES) == 102


def assert_close(actual, expected, tolerance=2e-6):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


# --- advantages ------------------------------------------------------------------------------------------------------


def scores_of(arrays):
    """`[num_groups, group_size]`; the golden groups are contiguous and of one size."""
    num_groups = len(np.unique(arrays["index"]))
    return arrays["token_level_rewards"].sum(0).reshape(num_groups, -1)


# The published trainers take the unbiased standard deviation where the papers, and our default, take the population's.
GROUP_ESTIMATORS = {
    "grpo": lambda scores, lengths: objectives.group_normalized(scores, ddof=1),
    "dr_grpo": lambda scores, lengths: objectives.group_centered(scores),
    "rloo": lambda scores, lengths: objectives.leave_one_out(scores),
    "opo": objectives.length_weighted,
    "grpo_passk": lambda scores, lengths: objectives.pass_at_k(scores, ddof=1),
}
# Compiled, as operation by operation takes longer.
GROUP_ESTIMATORS = {name: jax.jit(estimator) for name, estimator in GROUP_ESTIMATORS.items()}
whiten, group_centered = jax.jit(objectives.whiten, static_argnames="ddof"), jax.jit(objectives.group_centered)
gae, discounted_returns = jax.jit(objectives.gae), jax.jit(objectives.discounted_returns)
ESTIMATOR_CASES = cases(*GROUP_ESTIMATORS)


@ESTIMATOR_CASES
def test_group_estimators(case):
    arrays, _ = load(case)
    mask, scores = arrays["response_mask"], scores_of(arrays)
    result = np.asarray(GROUP_ESTIMATORS[case.split("/")[1]](scores, mask.sum(0).reshape(scores.shape)))
    assert_close(result.reshape(1, -1) * mask, arrays["advantages"])
    # On purpose: group 0 has no variance. The published mean is off by an ulp, so theirs is tiny at best; ours is 0.
    np.testing.assert_array_equal(result[0], 0.0)


WHITENED_CASES = cases("reinforce_plus_plus", "reinforce_plus_plus_baseline")


@WHITENED_CASES
def test_reinforce_plus_plus(case):
    arrays, settings = load(case)
    mask = arrays["response_mask"]
    if "baseline" in case:
        centred = np.reshape(group_centered(scores_of(arrays)), (1, -1))
        result = whiten(np.broadcast_to(centred, mask.shape), mask, ddof=1)
    else:
        rewards, ended = arrays["token_level_rewards"], last_valid(mask)
        returns = np.asarray(discounted_returns(rewards, ended, discount=settings["gamma"]))
        assert_close(returns * mask, arrays["returns"] * mask)
        result = whiten(returns, mask, ddof=1)
    assert_close(result, arrays["advantages"])


REMAX_CASES = cases("remax")


@REMAX_CASES
def test_greedy_baseline(case):
    arrays, _ = load(case)
    # Every rollout has its own greedy score here: groups of one.
    scores = jnp.asarray(arrays["token_level_rewards"].sum(0))[:, None]
    result = objectives.greedy_baseline(scores, jnp.asarray(arrays["reward_baselines"]))
    assert_close(result.reshape(1, -1) * arrays["response_mask"], arrays["advantages"])


GAE_CASES = cases("gae")


def last_valid(mask):
    following = np.concatenate([mask[1:], np.zeros_like(mask[:1])])
    return (mask == 1) & (following == 0)


@GAE_CASES
def test_gae(case):
    arrays, settings = load(case)
    mask, values = arrays["response_mask"], arrays["values"]
    ended = last_valid(mask)
    next_values = np.concatenate([values[1:], np.full_like(values[:1], np.nan)])  # ignored: all end before
    trace = {"discount": settings["gamma"], "gae_lambda": settings["lam"]}
    result = np.asarray(gae(arrays["token_level_rewards"], values, next_values, ended, np.zeros_like(ended), **trace))
    valid = mask == 1
    assert_close((result + values)[valid], arrays["returns"][valid])
    whitened = np.asarray(whiten(result, mask, ddof=1))
    # On purpose: theirs is -mean/std on invalid steps, which their loss masks; ours is 0.
    assert_close(whitened[valid], arrays["advantages"][valid])
    np.testing.assert_array_equal(whitened[~valid], 0.0)


# --- losses ----------------------------------------------------------------------------------------------------------

REDUCTIONS = {
    "token-mean": objectives.mean_over_steps,
    "token": objectives.mean_over_steps,
    "seq-mean-token-sum": objectives.mean_of_sequence_sums,
    "seq-mean-token-mean": objectives.mean_of_sequence_means,
    "seq": objectives.mean_of_sequence_means,
    # On purpose: verl divides the sum over the whole batch by the padded length only. Ours also divides by the number
    # of sequences, as the Dr. GRPO paper does, so that the loss does not grow with the batch.
    "seq-mean-token-sum-norm": lambda mask: objectives.sum_over_horizon(mask) * mask.shape[1],
}
# Three of verl's losses reduce by the mean of sequence means whatever mode is asked for.
ALWAYS_SEQUENCES = {"verl/loss_gspo", "verl/loss_sapo", "verl/loss_geo_mean"}


def objective(kind, log_prob, log_ratio, batch_advantages, mask, settings):
    """The objective of the published losses, composed from the public functions."""
    clip = {"clip_low": settings.get("clip_ratio_low"), "clip_high": settings.get("clip_ratio_high")}
    dual_clip = settings.get("clip_ratio_c", settings.get("clip_ratio_dual"))
    match kind:
        case "verl/loss_clip" | "easyr1/loss_default":
            return objectives.clipped_surrogate(log_ratio, batch_advantages, dual_clip=dual_clip, **clip)
        case "verl/loss_gspo":
            sequence = objectives.sequence_token_log_ratio(log_ratio, mask)
            return objectives.clipped_surrogate(sequence, batch_advantages, **clip)
        case "easyr1/loss_gspo":
            sequence = objectives.sequence_log_ratio(log_ratio, mask)
            return objectives.clipped_surrogate(sequence, batch_advantages, dual_clip=dual_clip, **clip)
        case "easyr1/loss_gspo_token":
            sequence = objectives.sequence_token_log_ratio(log_ratio, mask)
            return objectives.clipped_surrogate(sequence, batch_advantages, dual_clip=dual_clip, **clip)
        case "verl/loss_geo_mean":
            sequence = objectives.geometric_mean_log_ratio(log_ratio, batch_advantages, mask, **clip)
            return objectives.importance_ratio(sequence) * batch_advantages
        case "verl/loss_cispo" | "easyr1/loss_cispo":
            return objectives.cispo_surrogate(log_ratio, batch_advantages, log_prob=log_prob, **clip)
        case "verl/loss_sapo" | "easyr1/loss_sapo":
            return objectives.sapo_surrogate(
                log_ratio, batch_advantages,
                tau_positive=settings.get("tau_pos", settings.get("tau_positive")),
                tau_negative=settings.get("tau_neg", settings.get("tau_negative")),
            )  # fmt: skip
        case "verl/loss_gpg":
            return objectives.policy_gradient_surrogate(log_ratio, batch_advantages, log_prob=log_prob)


LOSS_CASES = cases(*{c.split("/")[1] for c in CASES if "/loss_" in c})


@LOSS_CASES
def test_policy_losses(case):
    source, function, mode, _ = case.split("/")
    kind = f"{source}/{function}"
    arrays, settings = load(case)
    mask = jnp.asarray(arrays["response_mask"])
    reduce = objectives.mean_of_sequence_means if kind in ALWAYS_SEQUENCES else REDUCTIONS[mode]

    def loss(log_prob):
        log_ratio = log_prob - arrays["old_log_prob"]
        values = objective(kind, log_prob, log_ratio, jnp.asarray(arrays["advantages"]), mask, settings)
        return -objectives.weighted_sum(values, reduce(mask))

    value, gradient = jax.jit(jax.value_and_grad(loss))(arrays["log_prob"])
    assert_close(value, arrays["loss"])
    assert_close(gradient, arrays["grad_log_prob"], tolerance=1e-5)


VALUE_CASES = cases("value_loss")


@VALUE_CASES
def test_clipped_value_loss(case):
    arrays, settings = load(case)

    def loss(values):
        each = objectives.value_loss(values, arrays["returns"], arrays["values"], clip=settings["cliprange_value"])
        return objectives.weighted_sum(each, objectives.mean_over_steps(jnp.asarray(arrays["response_mask"])))

    value, gradient = jax.jit(jax.value_and_grad(loss))(arrays["vpreds"])
    assert_close(value, arrays["loss"])
    assert_close(gradient, arrays["grad_vpreds"], tolerance=1e-5)


# --- divergences -----------------------------------------------------------------------------------------------------

ESTIMATES = {
    "kl_kl": objectives.k1,
    "kl_abs": objectives.abs_k1,
    "kl_mse": objectives.k2,
    "kl_low_var_kl": objectives.k3,
}
KL_CASES = cases(*ESTIMATES)


@KL_CASES
def test_kl_estimates(case):
    arrays, _ = load(case)
    estimate, reference = ESTIMATES[case.split("/")[1]], arrays["ref_log_prob"]
    log_prob, mask = jnp.asarray(arrays["log_prob"]), arrays["response_mask"]

    @jax.jit
    def compare(x):
        return estimate(x, reference), jax.grad(lambda x: jnp.sum(estimate(x, reference) * mask))(x)

    values, gradient = compare(log_prob)
    assert_close(values, arrays["kl"])
    assert_close(gradient, arrays["grad_of_masked_sum"], tolerance=1e-5)


COVERED = [ESTIMATOR_CASES, WHITENED_CASES, REMAX_CASES, GAE_CASES, LOSS_CASES, VALUE_CASES, KL_CASES]

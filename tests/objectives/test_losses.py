"""Ratios, surrogates, selections and reductions, and the whole losses of GRPO and PPO."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import objectives

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
LENGTHS = np.array([1, 4, 6, 2, 6, 3, 0, 5])
MASK = np.arange(6)[:, None] < LENGTHS
RNG = np.random.default_rng(0)
LOG_PROB, BEHAVIOUR, REFERENCE = RNG.normal(-1.2, 0.3, (3, *MASK.shape)).astype(np.float32)
ADVANTAGES = RNG.normal(size=MASK.shape).astype(np.float32)

SURROGATES = {
    "clipped": functools.partial(objectives.clipped_surrogate, **CLIP),
    "dual-clipped": functools.partial(objectives.clipped_surrogate, **CLIP, dual_clip=3.0),
    "policy gradient": objectives.policy_gradient_surrogate,
    "cispo": functools.partial(objectives.cispo_surrogate, **CLIP),
    "sapo": objectives.sapo_surrogate,
}
SURROGATES = {name: jax.jit(surrogate) for name, surrogate in SURROGATES.items()}
RATIOS = {
    "step": lambda d, a: d,
    "sequence": lambda d, a: objectives.sequence_log_ratio(d, MASK),
    "sequence token": lambda d, a: objectives.sequence_token_log_ratio(d, MASK),
}


def close(actual, expected, tolerance=2e-6):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def slope(function, x, *args, **kwargs):
    """The derivative of an elementwise function, at each element."""
    return jax.jit(jax.grad(lambda x: jnp.sum(function(x, *args, **kwargs))))(jnp.asarray(x, jnp.float32))


# --- ratios ----------------------------------------------------------------------------------------------------------


def test_sequence_ratio_is_the_geometric_mean_of_the_valid_steps():
    log_ratio = np.where(MASK, LOG_PROB - BEHAVIOUR, np.nan)
    functions = objectives.sequence_log_ratio, objectives.sequence_token_log_ratio
    ratios = [np.asarray(jax.jit(function)(log_ratio, MASK)) for function in functions]
    for i, length in enumerate(LENGTHS):
        expected = log_ratio[:length, i].mean() if length else 0.0
        for ratio in ratios:
            close(ratio[:length, i], np.full(length, expected))
        assert np.all(ratios[1][length:, i] == 0.0)


def test_extreme_log_ratios_stay_finite():
    far, sign = np.float32([-np.inf, -100.0, 100.0, np.inf] * 2), np.float32([-1] * 4 + [1] * 4)
    for name in ("clipped", "dual-clipped", "sapo"):
        assert np.isfinite(SURROGATES[name](far, sign)).all(), name
        assert not slope(SURROGATES[name], far, sign).any(), name  # beyond the clamp, or the clip
    far = np.float32([-100, 100])  # linear surrogates pull even from far away
    close(slope(objectives.policy_gradient_surrogate, far, np.float32(2)), [2, 2])
    close(slope(objectives.cispo_surrogate, far, np.float32(2), **CLIP), [1.6, 2.56])


# --- surrogates ------------------------------------------------------------------------------------------------------


def test_gradient_is_exactly_zero_where_the_clip_holds():
    ratio = jnp.asarray([0.5, 0.5, 1.5, 1.5, 5.0, 1.0])
    advantages = jnp.asarray([-2.0, 2.0, 2.0, -2.0, -2.0, -2.0])
    derivative = functools.partial(slope, objectives.clipped_surrogate, jnp.log(ratio), advantages, **CLIP)
    close(derivative(), [0.0, 1.0, 0.0, -3.0, -10.0, -2.0])
    assert np.all(np.asarray(derivative())[[0, 2]] == 0.0)
    assert np.asarray(derivative(dual_clip=3.0))[4] == 0.0
    # CISPO bounds the weight instead, and drops nothing.
    close(slope(objectives.cispo_surrogate, jnp.log(ratio), advantages, **CLIP), [-1.6, 1.6, 2.56, -2.56, -2.56, -2])


@pytest.mark.parametrize("surrogate", SURROGATES.values(), ids=SURROGATES)
def test_on_policy_every_surrogate_is_the_plain_policy_gradient(surrogate):
    # Sequence ratios share a gradient along a sequence, so the advantage is that of the sequence.
    advantages = jnp.broadcast_to(jnp.asarray(ADVANTAGES[:1]), MASK.shape)

    def loss(log_prob, ratio):
        values = surrogate(RATIOS[ratio](log_prob - LOG_PROB, advantages), advantages)
        return objectives.weighted_sum(values, objectives.mean_over_steps(MASK))

    gradients = jax.jit(lambda log_prob: {ratio: jax.grad(loss)(log_prob, ratio) for ratio in RATIOS})
    for gradient in gradients(LOG_PROB).values():
        close(gradient, np.where(MASK, advantages, 0.0) / MASK.sum())
    log_ratio = jnp.asarray(LOG_PROB - BEHAVIOUR)
    np.testing.assert_array_equal(slope(lambda a: surrogate(log_ratio, a), ADVANTAGES), 0.0)


# --- reductions ------------------------------------------------------------------------------------------------------


def test_reductions_against_loops():
    values = RNG.normal(size=MASK.shape)
    sequences = [values[:n, i] for i, n in enumerate(LENGTHS)]
    counted = [s for s in sequences if len(s)]  # a sequence without a valid step has no mean
    expected = {
        objectives.mean_over_steps: np.concatenate(sequences).mean(),
        objectives.mean_of_sequence_means: np.mean([s.mean() for s in counted]),
        objectives.mean_of_sequence_sums: np.mean([s.sum() for s in counted]),
        objectives.sum_over_horizon: np.sum([s.sum() for s in sequences]) / (8 * 6),
        functools.partial(objectives.sum_over_horizon, horizon=200): np.sum([s.sum() for s in sequences]) / (8 * 200),
    }
    garbage, total = np.where(MASK, values, np.nan).astype(np.float32), jax.jit(objectives.weighted_sum)
    for reduce, mean in expected.items():
        reduce = jax.jit(reduce)
        for mask in (MASK, np.float32(MASK)):
            close(total(garbage, reduce(mask)), mean)
        with jax.debug_nans(True):
            np.testing.assert_array_equal(reduce(np.zeros(MASK.shape, bool)), 0.0)


def test_weighted_sum_passes_no_gradient_into_what_it_ignores():
    weights = jnp.asarray([0.5, 0.0, 0.0, 0.0])
    values = jnp.asarray([2.0, jnp.nan, jnp.inf, -jnp.inf])
    value, gradient = jax.jit(jax.value_and_grad(objectives.weighted_sum))(values, weights)
    assert value == 1.0
    np.testing.assert_array_equal(gradient, [0.5, 0.0, 0.0, 0.0])


# --- value loss ------------------------------------------------------------------------------------------------------


def test_value_losses_by_hand():
    values, old, targets = jnp.asarray([1.0, 1.0, 3.0]), jnp.asarray([0.0, 0.9, 1.0]), jnp.asarray([2.0, 2.0, 2.0])
    close(objectives.value_loss(values, targets), [0.5, 0.5, 0.5])
    # Moved by more than 0.2, from far away: clipped to 0.2 and 1.2, and the larger error counts.
    clipped = functools.partial(objectives.value_loss, clip=0.2)
    close(clipped(values, targets, old), [0.5 * 1.8**2, 0.5, 0.5])
    gradients = jax.jit(jax.grad(lambda *x: jnp.sum(clipped(*x)), (0, 1, 2)))(values, targets, old)
    close(gradients, [[0.0, -1.0, 1.0], [0.0] * 3, [0.0] * 3])
    with pytest.raises(ValueError, match="pass behaviour_values"):
        clipped(values, targets)


# --- whole losses ----------------------------------------------------------------------------------------------------

GRPO_ARGUMENTS = [jnp.asarray(x) for x in (LOG_PROB, BEHAVIOUR, ADVANTAGES)]


def test_grpo_loss_is_its_formula():
    options = {"reference_log_prob": REFERENCE, "kl_coef": 0.1, "reduce": objectives.mean_of_sequence_means} | CLIP
    loss, metrics = jax.jit(functools.partial(objectives.grpo_loss, **options))(*GRPO_ARGUMENTS, jnp.asarray(MASK))
    arrays = LOG_PROB, BEHAVIOUR, ADVANTAGES, REFERENCE
    log_prob, behaviour, advantages, reference = (x.astype(np.float64) for x in arrays)
    ratio, gap = np.exp(log_prob - behaviour), reference - log_prob
    surrogate = np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.28) * advantages)
    weights = np.asarray(options["reduce"](jnp.asarray(MASK)), np.float64)
    close(loss, np.sum(weights * (-surrogate + 0.1 * (np.exp(gap) - 1 - gap))))
    means = {
        "policy/kl_reference": np.exp(gap) - 1 - gap,
        "policy/kl_behaviour": ratio - 1 - np.log(ratio),
        "policy/clip_fraction_low": (ratio < 0.8) & (advantages < 0),
        "policy/clip_fraction_high": (ratio > 1.28) & (advantages > 0),
        "advantage/abs_mean": np.abs(advantages),
    }
    expected = {"loss/policy": -np.sum(weights * surrogate), "policy/ratio_max": ratio[MASK].max()}
    expected |= {name: x[MASK].mean() for name, x in means.items()}
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        close(metrics[name], value)


def test_grpo_loss_gives_a_gradient_to_the_policy_only():
    grpo_loss = jax.jit(objectives.grpo_loss)
    close(grpo_loss(*GRPO_ARGUMENTS)[0], grpo_loss(*GRPO_ARGUMENTS, np.ones(MASK.shape, np.float32))[0])

    def loss(log_prob, behaviour, advantages, reference):
        return objectives.grpo_loss(
            log_prob, behaviour, advantages, jnp.asarray(MASK), reference_log_prob=reference, kl_coef=0.1
        )[0]

    gradients = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*GRPO_ARGUMENTS, REFERENCE)
    policy, *others = map(np.asarray, gradients)
    assert np.abs(policy[MASK]).max() > 0 and np.all(policy[~MASK] == 0)
    for gradient in others:
        np.testing.assert_array_equal(gradient, 0.0)


def garbage_where_masked(x):
    return jnp.asarray(np.where(MASK, x, np.nan))


def ppo_arguments(fill=jnp.asarray):
    rng = np.random.default_rng(7)
    values, behaviour_values, targets = rng.normal(size=(3, *MASK.shape)).astype(np.float32)
    entropy = np.abs(rng.normal(size=MASK.shape)).astype(np.float32)
    return [fill(x) for x in (LOG_PROB, BEHAVIOUR, ADVANTAGES, values, behaviour_values, targets, entropy)]


@pytest.mark.parametrize("function, number", [(objectives.grpo_loss, 3), (objectives.ppo_loss, 7)])
def test_what_is_masked_changes_nothing(function, number):
    """Not even in between, so that `jax_debug_nans` can be left on over padded batches."""
    differentiated = jax.jit(jax.value_and_grad(function, has_aux=True))
    clean = differentiated(*ppo_arguments()[:number], jnp.asarray(MASK))
    spoilt = ppo_arguments(garbage_where_masked)[:number]
    jax.tree.map(np.testing.assert_array_equal, clean, differentiated(*spoilt, jnp.asarray(MASK)))
    penalty = {"reference_log_prob": garbage_where_masked(REFERENCE), "kl_coef": 0.1} if number == 3 else {}
    with jax.debug_nans(True):
        assert np.isfinite(function(*spoilt, jnp.asarray(MASK), **penalty)[0])
        (loss, metrics), gradient = differentiated(*ppo_arguments()[:number], jnp.zeros(MASK.shape, bool))
    assert loss == 0.0 and all(np.isfinite(x) for x in metrics.values()) and not gradient.any()


@pytest.mark.parametrize("value_clip", [None, 0.2])
def test_ppo_loss_is_its_formula(value_clip):
    arguments = ppo_arguments()
    coefficients = {"value_clip": value_clip, "value_coef": 0.7, "entropy_coef": 0.03}
    loss, metrics = jax.jit(functools.partial(objectives.ppo_loss, **coefficients, **CLIP))(*arguments, MASK)
    policy_loss, _ = jax.jit(functools.partial(objectives.grpo_loss, **CLIP))(*arguments[:3], MASK)
    values, old, targets, entropy = (np.asarray(x, np.float64)[MASK] for x in arguments[3:])
    errors = (values - targets) ** 2
    if value_clip is not None:
        errors = np.maximum(errors, (old + np.clip(values - old, -0.2, 0.2) - targets) ** 2)
    close(metrics["loss/value"], 0.5 * errors.mean())
    close(metrics["policy/entropy"], entropy.mean())
    close(metrics["value/explained_variance"], 1 - np.var(targets - old) / np.var(targets), 1e-5)
    close(loss, policy_loss + 0.7 * 0.5 * errors.mean() - 0.03 * entropy.mean())


def test_explained_variance_of_constant_targets_is_zero():
    arguments, loss = ppo_arguments(), jax.jit(objectives.ppo_loss)
    for constant in (0.0, 100 / 3, -1e6 / 3, 1e30):
        arguments[5] = jnp.full(MASK.shape, constant)
        with jax.debug_nans(True):
            assert loss(*arguments, jnp.asarray(MASK))[1]["value/explained_variance"] == 0.0


@pytest.mark.parametrize("distance", [-100.0, 100.0])
def test_whole_loss_stays_finite_far_from_the_behaviour_policy(distance):
    log_prob, behaviour, advantages = GRPO_ARGUMENTS
    with jax.debug_nans(True):
        (loss, metrics), gradient = jax.jit(jax.value_and_grad(objectives.grpo_loss, has_aux=True))(
            log_prob, log_prob - distance, advantages, reference_log_prob=behaviour - distance, kl_coef=0.1
        )
    assert np.isfinite(loss) and np.isfinite(gradient).all() and all(np.isfinite(x) for x in metrics.values())

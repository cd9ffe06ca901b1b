"""Slots that leave out steps, or weigh whole sequences: each reads its own hyperparameters, and what it may compare."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import Hyperparams, objectives

RNG = np.random.default_rng(0)
T, N = 5, 4
BEHAVIOUR, CHANGE = np.log(RNG.uniform(0.1, 0.9, (T, N))), RNG.normal(size=(T, N)) * 0.4
LOG_PROB = np.minimum(BEHAVIOUR + CHANGE, -0.01)
ADVANTAGE, ENTROPY = RNG.normal(size=(T, N)), RNG.uniform(size=(T, N))
MASK = np.arange(T)[:, None] < np.array([5, 3, 4, 1])
LOW, HIGH, LIMIT, KL_COEF = 0.02, 0.2, 0.1, 0.5


@pytest.fixture(scope="module")
def slots():
    """What the slots return for the samples above, all in one program."""

    @jax.jit
    def compute(log_prob, behaviour, advantage, mask, entropy):
        hyperparams = Hyperparams(clip_low=LOW, clip_high=HIGH, kl_target=LIMIT, kl_coef=KL_COEF)
        together = {"whole_sequences": True, "whole_minibatches": True}
        batch = SimpleNamespace(log_prob=behaviour, advantage=advantage, mask=mask, **together)
        prediction = SimpleNamespace(log_prob=log_prob, entropy=entropy)
        names = ("near_behaviour", "high_entropy", "on_policy_sequences")
        slots = [getattr(objectives, f"keep_{name}") for name in names] + [objectives.k2_to_behaviour]
        values = {slot.__name__: slot(prediction, batch, hyperparams) for slot in slots}
        token = objectives.sequence_token_ratio
        values["ratio"], pullback = jax.vjp(lambda ratio: token(ratio, batch, hyperparams), log_prob - behaviour)
        return values | {"gradient": pullback(jnp.ones_like(log_prob))[0]}

    return jax.tree.map(np.asarray, compute(*map(jnp.asarray, (LOG_PROB, BEHAVIOUR, ADVANTAGE, MASK, ENTROPY))))


def test_steps_near_the_behaviour_are_kept(slots):
    kept = np.abs(np.exp(LOG_PROB) - np.exp(BEHAVIOUR)) <= LOW
    assert 0 < kept.sum() < kept.size and (slots["keep_near_behaviour"] == kept).all()


def test_the_fifth_with_the_most_entropy_is_kept(slots):
    kept = MASK & (np.quantile(ENTROPY[MASK], 0.8) <= ENTROPY)
    assert (slots["keep_high_entropy"] & MASK == kept).all() and kept.sum() == 3


def test_bad_sequences_that_moved_are_left_out(slots):
    moved = ((BEHAVIOUR - LOG_PROB) * MASK).sum(0) / MASK.sum(0) > LIMIT
    kept = (ADVANTAGE >= 0) | ~moved
    assert moved.any() and (slots["keep_on_policy_sequences"] == kept).all()


def test_a_token_has_the_ratio_of_its_sequence_and_its_own_gradient(slots):
    log_ratio = LOG_PROB - BEHAVIOUR
    mean = (log_ratio * MASK).sum(0) / MASK.sum(0)
    np.testing.assert_allclose(slots["ratio"], np.where(MASK, mean, 0.0), atol=1e-6)
    np.testing.assert_array_equal(slots["gradient"], MASK)
    np.testing.assert_allclose(slots["k2_to_behaviour"], KL_COEF * log_ratio**2 / 2, rtol=1e-4)


def test_what_compares_samples_needs_them_together():
    split = SimpleNamespace(whole_sequences=False, whole_minibatches=False)
    needs = {"sequence_token_ratio": "whole_sequences"}
    needs |= {"keep_high_entropy": "whole_minibatches", "keep_on_policy_sequences": "whole_sequences"}
    for slot, field in needs.items():
        with pytest.raises(ValueError, match=f"{slot} compares .* set {field}=True in the algorithm"):
            getattr(objectives, slot)(None, split, Hyperparams())

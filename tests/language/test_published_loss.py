"""The loss of completions by the formula that TRL's GRPOTrainer documents, in float64, against ours on the same logits.

TRL divides rewards by the unbiased standard deviation plus 1e-4; the formula of DeepSeekMath has the population's.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import Probe, acted

from grpo_jax import Config, Hyperparams, with_reference
from grpo_jax.algorithms import DAPO, DR_GRPO, GRPO, GSPO
from grpo_jax.objectives import group_normalized, mean_of_sequence_means, outcome
from grpo_jax.policies import Policy
from grpo_jax.policies.distributions import categorical
from grpo_jax.types import Trajectory
from grpo_jax.updates.batch import make_batch
from grpo_jax.updates.loss import loss

NUM_STEPS, GROUPS, MEMBERS, NUM_TOKENS = 6, 3, 4, 7
NUM = GROUPS * MEMBERS
HYPERPARAMS = Hyperparams(clip_low=0.2, clip_high=0.28, kl_coef=0.3, entropy_coef=0.0)

rng = np.random.default_rng(0)
LENGTHS = np.array([6, 1, 3, 2, 5, 5, 6, 4, 1, 2, 3, 6])
MASK = np.arange(NUM_STEPS)[:, None] < LENGTHS
TOKENS = rng.integers(0, NUM_TOKENS, (NUM_STEPS, NUM))
BEHAVIOUR = rng.normal(size=(NUM_STEPS, NUM, NUM_TOKENS)).astype(np.float32)
POLICY, REFERENCE = (BEHAVIOUR + rng.normal(scale=0.3, size=BEHAVIOUR.shape).astype(np.float32) for _ in range(2))
REWARDS = np.concatenate([np.ones(MEMBERS), rng.normal(size=NUM - MEMBERS)])  # the first group's are all equal


def log_softmax(logits):
    logits = logits.astype(np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def chosen(logits):
    return np.take_along_axis(log_softmax(logits), TOKENS[..., None], axis=-1)[..., 0]


def published(loss_type, beta, *, scaled=True, sequences=False):
    """The loss, and its gradient with respect to the logits."""
    rewards = REWARDS.reshape(GROUPS, MEMBERS)
    advantage = rewards - rewards.mean(1, keepdims=True)
    if scaled:
        advantage = advantage / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)
    advantage = advantage.reshape(NUM)
    log_prob, old, reference = map(chosen, (POLICY, BEHAVIOUR, REFERENCE))
    log_ratio, share = log_prob - old, np.eye(NUM_STEPS)[:, :, None] * MASK
    if sequences:  # importance_sampling_level="sequence"
        log_ratio = np.broadcast_to((log_ratio * MASK).sum(0) / LENGTHS, MASK.shape)
        share = np.broadcast_to(MASK / LENGTHS, (NUM_STEPS, *MASK.shape))  # d log_ratio[t] / d log_prob[u]
    ratio = np.exp(log_ratio)
    clipped = np.clip(ratio, 1 - HYPERPARAMS.clip_low, 1 + HYPERPARAMS.clip_high)
    per_token = -np.minimum(ratio * advantage, clipped * advantage)
    slope = np.where(ratio * advantage <= clipped * advantage, -ratio * advantage, 0.0)
    per_token = per_token + beta * (np.exp(reference - log_prob) - (reference - log_prob) - 1)
    weights = {"grpo": MASK / LENGTHS / NUM, "dapo": MASK / MASK.sum(), "dr_grpo": MASK / (NUM * NUM_STEPS)}[loss_type]
    to_log_prob = np.einsum("tn,tun->un", weights * slope, share)
    to_log_prob += weights * beta * (1 - np.exp(reference - log_prob))
    gradient = to_log_prob[..., None] * (np.eye(NUM_TOKENS)[TOKENS] - np.exp(log_softmax(POLICY)))
    return (weights * per_token).sum(), gradient


def ours(algorithm, kl_coef):
    """The loss of an update on these completions, and its gradient; the parameters are the logits."""

    def sequence(params, observation, carry, is_first):
        return jnp.asarray(params)[observation[..., 0], observation[..., 1]], None

    policy = Policy(None, None, None, sequence, categorical(NUM_TOKENS), has_critic=False, has_carry=False)
    rewards = np.where(np.arange(NUM_STEPS)[:, None] == LENGTHS - 1, REWARDS, 0.0).astype(np.float32)
    places = np.stack(np.indices(MASK.shape), axis=-1)
    steps = np.broadcast_to(np.arange(1, NUM_STEPS + 1)[:, None], MASK.shape)
    trajectory = Trajectory(
        observation=places, action=TOKENS, reward=rewards, terminated=rewards != 0, truncated=np.zeros_like(MASK),
        valid=MASK, log_prob=chosen(BEHAVIOUR), distribution=BEHAVIOUR, value=None, next_value=None,
        episode_return=rewards, episode_length=steps, discounted_return=rewards, carry=(),
    )  # fmt: skip
    trajectory = jax.tree.map(jnp.asarray, trajectory)
    hyperparams = HYPERPARAMS.replace(kl_coef=kl_coef)
    sizes = {"num_envs": MASK.shape[1], "group_size": MEMBERS, "num_minibatches": 1}
    config = Config(environment=Probe(), algorithm=algorithm, **sizes)

    @jax.jit
    def losses(params):
        batch = make_batch(config, policy, acted(BEHAVIOUR, reference_params=REFERENCE), trajectory, hyperparams)[0]
        return loss(config, policy, params, batch, batch.weight, hyperparams)[0]

    return jax.value_and_grad(losses)(jnp.asarray(POLICY))


unbiased = outcome(functools.partial(group_normalized, eps=1e-4, ddof=1))
CASES = {
    "grpo": (GRPO._replace(advantage=unbiased, reduce=mean_of_sequence_means), {"loss_type": "grpo"}),
    "dapo": (DAPO._replace(advantage=unbiased), {"loss_type": "dapo"}),
    "dr_grpo": (DR_GRPO, {"loss_type": "dr_grpo", "scaled": False}),
    "gspo": (GSPO._replace(advantage=unbiased), {"loss_type": "grpo", "sequences": True}),
}


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_the_published_formula(case, beta):
    algorithm, settings = CASES[case]
    expected, expected_gradient = published(beta=beta, **settings)
    value, gradient = ours(with_reference(algorithm._replace(live_groups_only=False)), beta)
    assert float(value) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-6)
    assert np.abs(expected_gradient).max() > 1e-2

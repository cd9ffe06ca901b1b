"""The loss of a batch, composed from the slots of an algorithm."""

import jax
import jax.numpy as jnp

from grpo_jax.algorithms import Algorithm
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.objectives.ratios import importance_ratio
from grpo_jax.objectives.reductions import weighted_sum
from grpo_jax.policies import Policy
from grpo_jax.policies.sampling import mask_actions
from grpo_jax.types import Batch, Metrics, Prediction, PyTree
from grpo_jax.updates.batch import check_shape

RATIO_MAX = "policy/ratio_max"  # the one metric that is a maximum, not a mean


def predict(policy: Policy, params: PyTree, batch: Batch) -> Prediction:
    """The outputs of `params` for the samples; the compiler leaves out those that no slot and no metric reads."""
    family = policy.distribution
    carry = jax.tree.map(lambda leaf: leaf[0], batch.carry)
    distribution, value = policy.sequence(params, batch.observation, carry, batch.is_first)
    distribution = mask_actions(distribution, batch.action_mask)
    reference = batch.reference_distribution
    return Prediction(
        log_prob=family.log_prob(distribution, batch.action),
        entropy=family.entropy(distribution),
        value=value,
        kl_behaviour=family.kl(batch.distribution, distribution),
        kl_reference=None if reference is None else family.kl(distribution, reference),
        reference_log_prob=None if reference is None else family.log_prob(reference, batch.action),
    )


def loss(
    algorithm: Algorithm,
    policy: Policy,
    params: PyTree,
    batch: Batch,
    per_step: jax.Array,
    hyperparams: Hyperparams,
) -> tuple[jax.Array, Metrics]:
    """Σ weight · (−surrogate + penalties + value_coef · value loss), and metrics of it.

    The weights in the batch are from the reduction of the whole rollout, so that the losses of parts add up.
    `policy/clip_fraction_low` and `_high` are the shares of steps whose advantage, negative or positive, has no effect
    on the gradient: 0 where no slot clips, or only a weight is clipped (CISPO).

    Args:
      algorithm: the slots.
      policy, params: the network, and the parameters to differentiate.
      batch: the samples.
      per_step: `[S, N]` weight of each sample in the metrics, which are means over valid steps.
      hyperparams: every coefficient.
    """
    prediction = predict(policy, params, batch)

    def surrogate_loss(step_log_ratio):
        log_ratio = check_shape("ratio", algorithm.ratio(step_log_ratio, batch, hyperparams), batch.mask)
        objective = check_shape("surrogate", algorithm.surrogate(log_ratio, batch.advantage, hyperparams), batch.mask)
        return weighted_sum(-objective, batch.weight), log_ratio

    step_log_ratio = prediction.log_prob - batch.log_prob
    policy_loss, log_ratio = surrogate_loss(step_log_ratio)
    total = policy_loss
    for penalty in algorithm.penalties:
        cost = check_shape("penalties", penalty(prediction, batch, hyperparams), batch.mask)
        total += weighted_sum(cost, batch.weight)

    slope, _ = jax.grad(surrogate_loss, has_aux=True)(jax.lax.stop_gradient(step_log_ratio))
    clipped = (slope == 0) & (batch.weight != 0)  # by any slot, in any way
    metrics = {
        "loss/policy": policy_loss,
        "policy/entropy": weighted_sum(prediction.entropy, per_step),
        "policy/kl_behaviour": weighted_sum(prediction.kl_behaviour, per_step),
        "policy/clip_fraction_low": weighted_sum(clipped & (batch.advantage < 0), per_step),
        "policy/clip_fraction_high": weighted_sum(clipped & (batch.advantage > 0), per_step),
        RATIO_MAX: jnp.max(importance_ratio(log_ratio), where=batch.mask, initial=0.0),
    }
    if algorithm.reference is not None:
        metrics["policy/kl_reference"] = weighted_sum(prediction.kl_reference, per_step)
    if algorithm.critic is not None:
        value_loss = weighted_sum(
            algorithm.critic(prediction.value, batch.target, batch.value, hyperparams), batch.weight
        )
        total += hyperparams.value_coef * value_loss
        metrics["loss/value"] = value_loss
    return total, metrics

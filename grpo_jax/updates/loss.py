"""The loss of a batch, composed from the slots of an algorithm."""

import functools

import jax
import jax.numpy as jnp

from grpo_jax.config import Config
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.objectives.divergences import k3, k3_from_behaviour
from grpo_jax.objectives.ratios import importance_ratio
from grpo_jax.objectives.reductions import sums, weighted
from grpo_jax.policies import Policy
from grpo_jax.policies.sampling import mask_actions, score
from grpo_jax.types import Batch, Metrics, Prediction, PyTree
from grpo_jax.updates.batch import check_shape

RATIO_MAX = "policy/ratio_max"  # the one metric that is a maximum, not a mean


def predict(policy: Policy, params: PyTree, batch: Batch) -> Prediction:
    """The outputs of `params` for the samples; the compiler leaves out those that no slot and no metric reads.

    With `logits_chunk`, divergences are estimates.
    """
    carry = jax.tree.map(lambda leaf: leaf[0], batch.carry)
    inputs = params, batch.observation, carry, batch.is_first
    if policy.logits_chunk is not None:
        features, value = policy.features(*inputs), None
        if policy.value_head is not None:
            value = policy.value_head(params, features)
        elif policy.has_critic:
            value = policy.sequence(*inputs)[1]
        log_prob, entropy = score(policy, params, features, batch.action, batch.action_mask)
        kl_behaviour, reference = k3_from_behaviour(batch.log_prob, log_prob), batch.reference_log_prob
        kl_reference = None if reference is None else k3(log_prob, reference)
        compute_features = lambda: features  # noqa: E731
    else:
        # The barrier stops XLA from repeating the loss, and its gradient, in every product of the network's last layer.
        distribution, value = jax.lax.optimization_barrier(policy.sequence(*inputs))
        distribution = mask_actions(distribution, batch.action_mask)
        family, reference = policy.distribution, batch.reference_distribution
        log_prob, entropy = family.log_prob(distribution, batch.action), family.entropy(distribution)
        kl_behaviour = family.kl(batch.distribution, distribution)
        kl_reference = None if reference is None else family.kl(distribution, reference)
        compute_features = policy.features and functools.partial(policy.features, *inputs)
    if policy.rounding:  # beyond what `precision.above_rounding` leaves out
        near = jnp.abs(log_prob - batch.log_prob) <= policy.rounding * jnp.maximum(1.0, jnp.abs(batch.log_prob))
        kl_behaviour = jnp.where(near, 0.0, kl_behaviour)
    reference = batch.reference_log_prob
    return Prediction(log_prob, entropy, value, kl_behaviour, kl_reference, reference, params, compute_features)


def loss(
    config: Config, policy: Policy, params: PyTree, batch: Batch, per_step: jax.Array, hyperparams: Hyperparams
) -> tuple[jax.Array, Metrics]:
    """Σ weight · (−surrogate + penalties + value_coef · value loss), and metrics of it.

    The weights in the batch are from the reduction of the whole rollout, so that the losses of parts add up.
    `policy/clip_fraction_low` and `_high` are the fractions of steps with zero gradient, by sign of the advantage: 0 if
    the algorithm does not clip, or clips only a weight (CISPO).

    Args:
      config: the slots of its algorithm.
      policy, params: the network, and the parameters to differentiate.
      batch: the samples.
      per_step: `[S, N]` weight of each sample in the metrics, which are means over valid steps.
      hyperparams: every coefficient.
    """
    algorithm = config.algorithm
    prediction = predict(policy, params, batch)

    def surrogate(step_log_ratio):
        log_ratio = check_shape("ratio", algorithm.ratio(step_log_ratio, batch, hyperparams), batch.mask)
        if algorithm.group_surrogate is None:
            objective = algorithm.surrogate(log_ratio, batch.advantage, hyperparams)
        else:
            objective = group_objective(config, step_log_ratio + batch.log_prob, batch, hyperparams)
        objective = check_shape("surrogate", objective, batch.mask)
        if algorithm.step_mask is not None:
            kept = check_shape("step_mask", algorithm.step_mask(prediction, batch, hyperparams), batch.mask)
            objective = jnp.where(jax.lax.stop_gradient(kept), objective, 0.0)
        return objective, log_ratio

    # The surrogate of log r = log pi(a|s) - log pi_behaviour(a|s), its slope, and the penalties.
    objective, pullback, log_ratio = jax.vjp(surrogate, prediction.log_prob - batch.log_prob, has_aux=True)
    penalties = [penalty(prediction, batch, hyperparams) for penalty in algorithm.penalties]
    penalties = [check_shape("penalties", penalty, batch.mask) for penalty in penalties]
    slope = jax.lax.stop_gradient(pullback(batch.weight.astype(objective.dtype))[0])
    clipped = (slope == 0) & (batch.weight != 0)  # by any slot, in any way

    # What is averaged: metrics over valid steps, losses by the weights of the reduction.
    means = {
        "policy/entropy": prediction.entropy,
        "policy/kl_behaviour": prediction.kl_behaviour,
        "policy/clip_fraction_low": clipped & (batch.advantage < 0),
        "policy/clip_fraction_high": clipped & (batch.advantage > 0),
    }
    if algorithm.reference is not None:
        means["policy/kl_reference"] = prediction.kl_reference
    losses = {"loss/policy": -objective}
    if algorithm.critic is not None:
        losses["loss/value"] = algorithm.critic(prediction.value, batch.target, batch.value, hyperparams)

    weighed = [*means.values(), *losses.values(), *penalties]
    weights = [per_step] * len(means) + [batch.weight] * (len(losses) + len(penalties))
    totals = sums(tuple(map(weighted, weighed, weights)))
    metrics = dict(zip([*means, *losses], totals, strict=False))
    total = metrics["loss/policy"] + sum(totals[len(means) + len(losses) :])
    if algorithm.critic is not None:
        total += hyperparams.value_coef * metrics["loss/value"]
    return total, metrics | {RATIO_MAX: jnp.max(importance_ratio(log_ratio), where=batch.mask, initial=0.0)}


def group_objective(config: Config, log_prob: jax.Array, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """`[S, N]`: what `group_surrogate` gives for a group, on all steps of its members.

    Its sum with the weights of `mean_of_sequence_means` is the mean over groups, if all members are valid.
    """
    valid, num_steps = jnp.any(batch.mask, axis=0), jnp.sum(batch.mask, axis=0, dtype=float)

    def members(values):
        return values.reshape(-1, config.group_size)

    totals = [jnp.sum(x, axis=0, where=batch.mask) for x in (log_prob, batch.log_prob, batch.advantage)]
    totals[2] /= jnp.maximum(num_steps, 1.0)
    objective = config.algorithm.group_surrogate(*map(members, (*totals, valid)), hyperparams)
    objective = check_shape("group_surrogate", objective, members(valid)[:, 0])
    return jnp.broadcast_to(jnp.repeat(objective, config.group_size), batch.mask.shape)

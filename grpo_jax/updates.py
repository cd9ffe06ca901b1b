"""From a trajectory to new parameters: the loss that an algorithm's slots compose, and the epochs that descend it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from grpo_jax import losses
from grpo_jax.algorithms import Algorithm
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.networks import Policy
from grpo_jax.types import Batch, Metrics, Prediction, PyTree, Trajectory


class Learner(NamedTuple):
    """What a gradient step changes."""

    params: PyTree
    optimizer: Any


def learning_rate(hyperparams: Hyperparams, progress: jax.Array) -> jax.Array:
    """Linear from `learning_rate` to `final_learning_rate` as `progress` goes from 0 to 1, constant after."""
    start, end = hyperparams.learning_rate, hyperparams.final_learning_rate
    return start + (end - start) * jnp.minimum(progress, 1.0)


def make_optimizer(hyperparams: Hyperparams, progress: jax.Array) -> optax.GradientTransformation:
    """Adam behind a limit on the gradient's global norm. Rebuilt in each step, as all its settings are traced."""
    return optax.chain(
        optax.clip_by_global_norm(hyperparams.max_grad_norm),
        optax.scale_by_adam(eps=hyperparams.adam_eps),
        optax.scale_by_learning_rate(learning_rate(hyperparams, progress)),
    )


def make_batch(
    algorithm: Algorithm,
    policy: Policy,
    trajectory: Trajectory,
    advantage: jax.Array,
    reference_params: PyTree,
) -> Batch:
    """The samples of a trajectory; all that stays fixed during the epochs is computed here, once."""
    reference_distribution = None
    if algorithm.reference is not None:
        reference_distribution, _ = policy.sequence(reference_params, trajectory.observation)
    batch = Batch(
        observation=trajectory.observation,
        action=trajectory.action,
        log_prob=trajectory.log_prob,
        distribution=trajectory.distribution,
        reference_distribution=reference_distribution,
        advantage=advantage,
        mask=trajectory.valid,
        value=trajectory.value,
        target=None if trajectory.value is None else advantage + trajectory.value,
    )
    if not algorithm.whole_sequences:
        batch = jax.tree.map(lambda leaf: leaf.reshape(1, -1, *leaf.shape[2:]), batch)
    return jax.lax.stop_gradient(batch)


def predict(policy: Policy, params: PyTree, batch: Batch) -> Prediction:
    """What `params` say of the samples; parts that no slot and no metric reads are never computed."""
    family = policy.distribution
    distribution, value = policy.sequence(params, batch.observation)
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
    algorithm: Algorithm, policy: Policy, params: PyTree, batch: Batch, hyperparams: Hyperparams
) -> tuple[jax.Array, Metrics]:
    """Σ weights · (−surrogate + penalties + value_coef · value loss) over the batch, and what to report of it."""
    weights = algorithm.reduce(batch.mask)
    advantage = batch.advantage if algorithm.normalize is None else algorithm.normalize(batch.advantage, batch.mask)
    prediction = predict(policy, params, batch)
    log_ratio = prediction.log_prob - batch.log_prob

    objective = algorithm.surrogate(algorithm.ratio(log_ratio, batch, hyperparams), advantage, hyperparams)
    policy_loss = losses.weighted_sum(-objective, weights)
    total = policy_loss
    for penalty in algorithm.penalties:
        total += losses.weighted_sum(penalty(prediction, batch, hyperparams), weights)

    per_step = losses.mean_over_steps(batch.mask)
    clipped_low, clipped_high = losses.clip_fractions(
        log_ratio, advantage, clip_low=hyperparams.clip_low, clip_high=hyperparams.clip_high
    )
    metrics = {
        "loss/policy": policy_loss,
        "policy/entropy": losses.weighted_sum(prediction.entropy, per_step),
        "policy/kl_behaviour": losses.weighted_sum(prediction.kl_behaviour, per_step),
        "policy/clip_fraction_low": losses.weighted_sum(clipped_low, per_step),
        "policy/clip_fraction_high": losses.weighted_sum(clipped_high, per_step),
        "policy/ratio_max": jnp.max(losses.importance_ratio(log_ratio), where=batch.mask, initial=0.0),
    }
    if algorithm.reference is not None:
        metrics["policy/kl_reference"] = losses.weighted_sum(prediction.kl_reference, per_step)
    if algorithm.critic is not None:
        value_loss = losses.weighted_sum(algorithm.critic(prediction.value, batch, hyperparams), weights)
        total += hyperparams.value_coef * value_loss
        metrics["loss/value"] = value_loss
    return total, metrics


def update_epochs(
    algorithm: Algorithm,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    learner: Learner,
    batch: Batch,
    hyperparams: Hyperparams,
    key: jax.Array,
    *,
    num_epochs: int,
    num_minibatches: int,
) -> tuple[Learner, Metrics]:
    """Descends the loss for `num_epochs` passes over the batch, each in another random order.

    An update whose loss or gradient is not finite changes nothing and is counted in `optim/skipped_updates`. The other
    metrics are means over the updates that were applied, `policy/ratio_max` their maximum.
    """
    num_samples = batch.mask.shape[1]

    def update(learner, indices):
        minibatch = jax.tree.map(lambda leaf: jnp.take(leaf, indices, axis=1), batch)
        (total, metrics), gradient = jax.value_and_grad(lambda p: loss(algorithm, policy, p, minibatch, hyperparams), has_aux=True)(learner.params)
        grad_norm = optax.global_norm(gradient)
        steps, optimizer_state = optimizer.update(gradient, learner.optimizer, learner.params)
        updated = Learner(optax.apply_updates(learner.params, steps), optimizer_state)
        applied = jnp.isfinite(total) & jnp.isfinite(grad_norm)
        learner = jax.tree.map(lambda new, old: jnp.where(applied, new, old), updated, learner)
        return learner, (applied, metrics | {"optim/grad_norm": grad_norm})

    def epoch(learner, key):
        order = jax.random.permutation(key, num_samples)
        return jax.lax.scan(update, learner, order.reshape(num_minibatches, -1))

    learner, (applied, metrics) = jax.lax.scan(epoch, learner, jax.random.split(key, num_epochs))
    summary = {name: jnp.mean(value, where=applied) for name, value in metrics.items()}
    summary["policy/ratio_max"] = jnp.max(metrics["policy/ratio_max"], where=applied, initial=0.0)
    summary["optim/skipped_updates"] = jnp.sum(~applied).astype(jnp.float32)
    return learner, summary

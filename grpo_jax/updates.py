"""From a trajectory to new parameters: the loss that an algorithm's slots compose, and the epochs that descend it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from grpo_jax import divergences, losses
from grpo_jax.advantages import next_values
from grpo_jax.algorithms import Algorithm
from grpo_jax.gathering import gatherer
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.masking import mask_actions
from grpo_jax.networks import Policy
from grpo_jax.sharding import along_envs, on_every_device
from grpo_jax.shuffle import shuffled_order
from grpo_jax.slots import gae_advantage
from grpo_jax.types import Batch, Metrics, Prediction, PyTree, Trajectory, Whole

RATIO_MAX = "policy/ratio_max"  # the one metric that is a maximum, not a mean


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


def of_whole_sequences(algorithm: Algorithm, policy: Policy) -> bool:
    """Whether minibatches are of whole rollouts (S = T): for a slot that compares their steps, or a memory."""
    return algorithm.whole_sequences or policy.has_memory


def make_batch(
    algorithm: Algorithm,
    policy: Policy,
    params: PyTree,
    trajectory: Trajectory,
    reference_params: PyTree,
    hyperparams: Hyperparams,
    group_size: int,
    num_windows: int = 1,
) -> Batch:
    """The samples of a trajectory; all that stays fixed during the epochs is computed here, once.

    `params` are those that acted. A baseline sees one of the windows at a time: the later ones know what came of the
    actions of the earlier. Advantages are relative to the values of the algorithm's baseline; where it has a
    critic too, the critic's own predictions are what `Batch.value` holds.
    A reference policy with memory starts each rollout from its initial carry: in a window that begins in the middle of
    an episode it has not seen what came before.
    """
    reference_distribution = None
    if algorithm.reference is not None:
        reference_distribution, _ = policy.sequence(
            reference_params,
            trajectory.observation,
            jax.tree.map(lambda leaf: leaf[0], trajectory.carry),
            trajectory.starts.at[0].set(True),
        )
        reference_distribution = mask_actions(reference_distribution, trajectory.action_mask)
    if algorithm.reward is not None:
        kl = None
        if reference_distribution is not None:
            reference_log_prob = policy.distribution.log_prob(reference_distribution, trajectory.action)
            kl = divergences.k1(trajectory.log_prob, reference_log_prob)
        reward = algorithm.reward(trajectory, kl, hyperparams)
        trajectory = trajectory._replace(reward=_shaped("reward", reward, trajectory.reward))

    compared = trajectory
    if algorithm.baseline is not None:
        value, final_value = _of_each_window(
            lambda window: algorithm.baseline(window, policy, params, hyperparams, group_size), trajectory, num_windows
        )
        value = _shaped("baseline", value, trajectory.reward)
        compared = trajectory._replace(value=value, next_value=next_values(value, final_value, trajectory.truncated))
    advantage = _shaped("advantage", algorithm.advantage(compared, hyperparams, group_size), trajectory.reward)
    target = None if compared.value is None else advantage + compared.value
    if algorithm.baseline is not None and trajectory.value is not None:  # the critic learns of its own states alone
        target = gae_advantage(trajectory, hyperparams, group_size) + trajectory.value
    mask = trajectory.valid
    if trajectory.greedy is not None:
        mask &= ~trajectory.greedy
    if algorithm.filter_overlong:
        mask &= jnp.any(trajectory.terminated, axis=0)
    if trajectory.given is not None:
        mask &= trajectory.given  # what the policy did afterwards only tells the value of the action that was given
    if algorithm.live_groups_only:
        mask &= live_groups(advantage, mask, group_size)
    weight = _shaped("reduce", algorithm.reduce(mask), mask)
    if trajectory.given is not None:
        # One member of the group took each action, which the policy takes with its probability.
        weight *= group_size * jnp.exp(trajectory.log_prob)
    whole_sequences = of_whole_sequences(algorithm, policy)
    batch = Batch(
        observation=trajectory.observation,
        action=trajectory.action,
        log_prob=trajectory.log_prob,
        distribution=trajectory.distribution,
        reference_distribution=reference_distribution,
        advantage=advantage,
        mask=mask,
        weight=weight,
        value=compared.value if trajectory.value is None else trajectory.value,
        target=target,
        action_mask=trajectory.action_mask,
        starts=trajectory.starts,
        carry=trajectory.carry,
        whole=Whole(sequences=whole_sequences, minibatches=algorithm.whole_minibatches),
    )
    if not whole_sequences:
        batch = jax.tree.map(lambda leaf: leaf.reshape(1, -1, *leaf.shape[2:]), batch)
    return jax.lax.stop_gradient(batch)


def _of_each_window(function: Callable, trajectory: Trajectory, num_windows: int) -> PyTree:
    """What the function makes of each window of a trajectory `[T, W * B]`, side by side again."""
    if num_windows == 1:
        return function(trajectory)
    windows = jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0], num_windows, -1, *leaf.shape[2:]), trajectory)
    values = jax.vmap(function, in_axes=1, out_axes=1)(windows)
    return jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0], -1), values)


def live_groups(advantage: jax.Array, mask: jax.Array, group_size: int) -> jax.Array:
    """`[B]` bool: members of the groups that say of some step that it was better or worse than another."""
    says = jnp.any(mask & (advantage != 0), axis=0).reshape(-1, group_size)
    return jnp.repeat(jnp.any(says, axis=1), group_size)


def members_per_carry(policy: Policy, batch: Batch) -> int:
    """How many neighbours in a batch have one carry between them, and so stay together: a group, or 1."""
    leaves = jax.tree.leaves(batch.carry) if policy.has_memory else []
    return batch.mask.shape[1] // leaves[0].shape[1] if leaves else 1


def _shaped(slot: str, value: jax.Array, like: jax.Array) -> jax.Array:
    """The value, if the slot that made it kept to its shape."""
    if jnp.shape(value) != like.shape:
        raise ValueError(f"the slot {slot!r} returned shape {jnp.shape(value)}, and should return {like.shape}")
    return value


def predict(policy: Policy, params: PyTree, batch: Batch) -> Prediction:
    """What `params` say of the samples; parts that no slot and no metric reads are never computed."""
    family = policy.distribution
    carry = jax.tree.map(lambda leaf: leaf[0], batch.carry)
    distribution, value = policy.sequence(params, batch.observation, carry, batch.starts)
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
    """Σ weight · (−surrogate + penalties + value_coef · value loss), and what to report of it.

    The weights are in the batch, from the algorithm's reduction of the whole rollout: losses of parts add up.
    `policy/clip_fraction_low` and `_high` are the shares of steps whose advantage, negative or positive, has no effect
    on the gradient: 0 where no slot clips, or what is clipped is a weight (CISPO).

    Args:
      algorithm, policy, params: whose slots, which network, at which parameters.
      batch: the samples.
      per_step: `[S, N]` of each sample in the metrics, which are means over valid steps.
      hyperparams: every coefficient.
    """
    prediction = predict(policy, params, batch)

    def surrogate_loss(step_log_ratio):
        log_ratio = _shaped("ratio", algorithm.ratio(step_log_ratio, batch, hyperparams), batch.mask)
        objective = _shaped("surrogate", algorithm.surrogate(log_ratio, batch.advantage, hyperparams), batch.mask)
        return losses.weighted_sum(-objective, batch.weight), log_ratio

    step_log_ratio = prediction.log_prob - batch.log_prob
    policy_loss, log_ratio = surrogate_loss(step_log_ratio)
    total = policy_loss
    for penalty in algorithm.penalties:
        cost = _shaped("penalties", penalty(prediction, batch, hyperparams), batch.mask)
        total += losses.weighted_sum(cost, batch.weight)

    slope, _ = jax.grad(surrogate_loss, has_aux=True)(jax.lax.stop_gradient(step_log_ratio))
    clipped = (slope == 0) & (batch.weight != 0)  # whichever slot clips, and however
    metrics = {
        "loss/policy": policy_loss,
        "policy/entropy": losses.weighted_sum(prediction.entropy, per_step),
        "policy/kl_behaviour": losses.weighted_sum(prediction.kl_behaviour, per_step),
        "policy/clip_fraction_low": losses.weighted_sum(clipped & (batch.advantage < 0), per_step),
        "policy/clip_fraction_high": losses.weighted_sum(clipped & (batch.advantage > 0), per_step),
        RATIO_MAX: jnp.max(losses.importance_ratio(log_ratio), where=batch.mask, initial=0.0),
    }
    if algorithm.reference is not None:
        metrics["policy/kl_reference"] = losses.weighted_sum(prediction.kl_reference, per_step)
    if algorithm.critic is not None:
        value_loss = losses.weighted_sum(algorithm.critic(prediction.value, batch, hyperparams), batch.weight)
        total += hyperparams.value_coef * value_loss
        metrics["loss/value"] = value_loss
    return total, metrics


def default_microbatches(algorithm: Algorithm, num_steps: int, num_sequences: int, together: int = 1) -> int:
    """Parts of a minibatch `[S, n]`: as many as keep one small enough for a core's cache, or an accelerator's memory.

    Sequences are never cut, nor groups of `together`, and eight stay together where there are as many: a memory goes
    through a part step by step, and narrower steps waste a processor's vector units.
    """
    if algorithm.whole_minibatches:
        return 1
    most = max(8, (512 if jax.default_backend() == "cpu" else 65_536) // num_steps)
    num_units = num_sequences // together
    fewest = min(-(-num_sequences // most), num_units)
    return next((n for n in range(fewest, 4 * fewest) if num_units % n == 0), 1)


def minibatch_gradient(
    algorithm: Algorithm,
    policy: Policy,
    params: PyTree,
    batch: Batch,
    indices: jax.Array,
    hyperparams: Hyperparams,
    num_microbatches: int | None = None,
) -> tuple[jax.Array, Metrics, PyTree]:
    """Loss, metrics and gradient over the samples at `indices`, accumulated over parts of equal size.

    The parts bound the memory of the backward pass and stay in a processor's cache; the sum is that of the whole but
    for rounding. Valid samples come first in `indices`, and parts without any are skipped: steps after the end of a
    one-episode member cost nothing. Without `num_microbatches` it is chosen by size (`default_microbatches`).
    """
    together = members_per_carry(policy, batch)
    if num_microbatches is None:
        num_microbatches = default_microbatches(algorithm, batch.mask.shape[0], indices.shape[0], together)
    advantage, mask, weight = gatherer((batch.advantage, batch.mask, batch.weight))(indices)
    if algorithm.normalize is not None:
        advantage = algorithm.normalize(advantage, mask)
    weight *= batch.mask.shape[1] / indices.shape[0]
    per_step = losses.mean_over_steps(mask)

    size = indices.shape[0] // num_microbatches
    # The same in all minibatches, so that compilers make it once, before the loops over them.
    take = gatherer(batch._replace(carry=None, advantage=None, mask=None, weight=None))

    def part(i):
        here, advantage_here, mask_here, weight_here, per_step_here = (
            jax.lax.dynamic_slice_in_dim(leaf, i * size, size, axis=-1)
            for leaf in (indices, advantage, mask, weight, per_step)
        )
        carry = jax.tree.map(lambda leaf: jnp.take(leaf, here[::together] // together, axis=1), batch.carry)
        samples = take(here)._replace(advantage=advantage_here, mask=mask_here, weight=weight_here, carry=carry)
        samples = along_envs(samples, axis=1)
        samples = jax.lax.optimization_barrier(samples)  # or XLA repeats the gather wherever a sample is used
        (total, metrics), gradient = jax.value_and_grad(loss, argnums=2, has_aux=True)(
            algorithm, policy, params, samples, per_step_here, hyperparams
        )
        return total, metrics, gradient

    def accumulate(i, sums):
        (total, metrics, gradient), new = sums, part(i)
        ratio_max = jnp.maximum(metrics[RATIO_MAX], new[1][RATIO_MAX])
        total, metrics, gradient = jax.tree.map(jnp.add, (total, metrics, gradient), new)
        return total, metrics | {RATIO_MAX: ratio_max}, gradient

    if num_microbatches == 1:
        return part(0)
    # Units of neighbours come whole, those with a valid sample first.
    num_valid = together * jnp.sum(jnp.any(mask.reshape(mask.shape[0], -1, together), axis=(0, 2)))
    num_parts = (num_valid + size - 1) // size
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(part, 0))
    return jax.lax.fori_loop(0, num_parts, accumulate, nothing)


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
    num_microbatches: int | None = None,
) -> tuple[Learner, Metrics]:
    """Descends the loss for `num_epochs` passes over the batch, each in another random order.

    The valid samples of a pass are dealt out evenly over its minibatches, as whole groups where those share a carry. An
    update whose loss or gradient is not finite changes nothing and is counted in `optim/skipped_updates`; one without a
    valid sample, or after the KL to the behaviour policy exceeded `kl_limit`, changes nothing either. The other metrics
    are means over the updates that were applied, `policy/ratio_max` their maximum.
    """

    def update(carry, indices):
        learner, within_limit = carry
        total, metrics, gradient = minibatch_gradient(
            algorithm, policy, learner.params, batch, indices, hyperparams, num_microbatches
        )
        grad_norm = optax.global_norm(gradient)
        steps, optimizer_state = optimizer.update(gradient, learner.optimizer, learner.params)
        updated = Learner(optax.apply_updates(learner.params, steps), optimizer_state)
        finite = jnp.isfinite(total) & jnp.isfinite(grad_norm)
        within_limit &= ~(metrics["policy/kl_behaviour"] > hyperparams.kl_limit)
        applied = finite & within_limit & jnp.any(batch.mask[:, indices])
        learner = jax.tree.map(lambda new, old: jnp.where(applied, new, old), updated, learner)
        return (learner, within_limit), (applied, finite, metrics | {"optim/grad_norm": grad_norm})

    def epoch(carry, key):
        order = shuffled_order(key, jnp.any(batch.mask.reshape(-1, num_units, together), axis=(0, 2)))
        members = order.reshape(-1, num_minibatches, 1) * together + jnp.arange(together)
        return jax.lax.scan(update, carry, jnp.swapaxes(members, 0, 1).reshape(num_minibatches, -1))

    together = members_per_carry(policy, batch)
    num_units = batch.mask.shape[1] // together
    # Minibatches mix all environments: gathered once, rather than communicated in each update.
    batch = on_every_device(batch)
    start = (learner, jnp.array(True))
    (learner, _), (applied, finite, metrics) = jax.lax.scan(epoch, start, jax.random.split(key, num_epochs))
    summary = {name: jnp.mean(value, where=applied) for name, value in metrics.items()}
    summary[RATIO_MAX] = jnp.max(metrics[RATIO_MAX], where=applied, initial=0.0)
    summary["optim/skipped_updates"] = jnp.sum(~finite).astype(jnp.float32)
    return learner, summary

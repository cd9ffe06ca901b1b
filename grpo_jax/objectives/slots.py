"""What can fill the slots of an `Algorithm`: the functions of layer 1, bound to trajectories and hyperparameters.

Every function that weighs something reads its coefficient from the hyperparameters it is given, so all stay traced.
`[T, B]` are the steps of a trajectory, `[S, N]` the samples of a batch (see `grpo_jax.types`).
"""

import jax
import jax.numpy as jnp

from grpo_jax.hyperparams import Hyperparams
from grpo_jax.objectives import advantages, divergences, losses
from grpo_jax.types import Batch, Prediction, PyTree, Trajectory

# --- advantage -------------------------------------------------------------------------------------------------------


def episode_scores(trajectory: Trajectory, group_size: int) -> jax.Array:
    """`[num_groups, group_size]`: the undiscounted return of each member's rollout."""
    return jnp.sum(trajectory.reward, axis=0, where=trajectory.valid).reshape(-1, group_size)


def _on_every_step(advantage: jax.Array, trajectory: Trajectory) -> jax.Array:
    """Outcome supervision: the advantage of a rollout `[num_groups, group_size]` is that of each of its steps."""
    return jnp.where(trajectory.valid, advantage.reshape(1, -1), 0.0)


def _returns_to_go(trajectory: Trajectory, hyperparams: Hyperparams) -> jax.Array:
    return advantages.discounted_returns(trajectory.reward, trajectory.ended, discount=hyperparams.discount)


def group_normalized_advantage(trajectory: Trajectory, hyperparams: Hyperparams, group_size: int) -> jax.Array:
    """The rollout's return, standardised in its group, at each of its steps."""
    return _on_every_step(advantages.group_normalized(episode_scores(trajectory, group_size)), trajectory)


def group_centered_advantage(trajectory: Trajectory, hyperparams: Hyperparams, group_size: int) -> jax.Array:
    """The rollout's return minus its group's mean, at each of its steps."""
    return _on_every_step(advantages.group_centered(episode_scores(trajectory, group_size)), trajectory)


def leave_one_out_advantage(trajectory: Trajectory, hyperparams: Hyperparams, group_size: int) -> jax.Array:
    """The rollout's return minus the mean of the group's others, at each of its steps."""
    return _on_every_step(advantages.leave_one_out(episode_scores(trajectory, group_size)), trajectory)


def batch_normalized_advantage(trajectory: Trajectory, hyperparams: Hyperparams, group_size: int) -> jax.Array:
    """The rollout's return, centred in its group and scaled by the batch, at each of its steps."""
    return _on_every_step(advantages.batch_normalized(episode_scores(trajectory, group_size)), trajectory)


def length_weighted_advantage(trajectory: Trajectory, hyperparams: Hyperparams, group_size: int) -> jax.Array:
    """The rollout's return minus its group's length-weighted mean, at each of its steps."""
    lengths = jnp.sum(trajectory.valid, axis=0).reshape(-1, group_size)
    return _on_every_step(advantages.length_weighted(episode_scores(trajectory, group_size), lengths), trajectory)


def pass_at_k_advantage(trajectory: Trajectory, hyperparams: Hyperparams, group_size: int) -> jax.Array:
    """Only the best of the group: its return minus the second best, at each of its steps."""
    return _on_every_step(advantages.pass_at_k(episode_scores(trajectory, group_size)), trajectory)


def greedy_baseline_advantage(trajectory: Trajectory, hyperparams: Hyperparams, group_size: int) -> jax.Array:
    """The rollout's return minus that of the group's greedy member, its first, at each of its steps."""
    if trajectory.greedy is None:
        raise ValueError(
            "greedy_baseline_advantage takes the first member of each group for a greedy one; set greedy_member=True"
        )
    scores = episode_scores(trajectory, group_size)
    return _on_every_step(advantages.greedy_baseline(scores, scores[:, 0]), trajectory)


def decoupled_advantage(trajectory: Trajectory, hyperparams: Hyperparams, group_size: int) -> jax.Array:
    """GDPO: each part of the rollout's reward, standardised in its group by itself; their weighted sum at each step."""
    if trajectory.reward_parts is None:
        raise ValueError("decoupled_advantage needs the parts of the reward, which token tasks alone tell; use another")
    valid = trajectory.valid[..., None]
    values, weights = trajectory.reward_parts
    scores = jnp.sum(values, axis=0, where=valid).T.reshape(values.shape[-1], -1, group_size)
    weights = weights[0].T.reshape(scores.shape)  # may differ between groups, not within
    of_group = jax.vmap(lambda scores, weights: advantages.decoupled_normalized(scores[:, None], weights[:, 0])[0], 1)
    return _on_every_step(of_group(scores, weights), trajectory)


def process_supervised_advantage(trajectory: Trajectory, hyperparams: Hyperparams, group_size: int) -> jax.Array:
    """Step rewards, standardised over the group and summed to go."""
    return advantages.process_supervised(trajectory.reward, trajectory.valid, group_size)


def return_to_go_advantage(trajectory: Trajectory, hyperparams: Hyperparams, group_size: int) -> jax.Array:
    """Discounted return-to-go minus the mean of the group's others at the same step."""
    returns = _returns_to_go(trajectory, hyperparams)
    return advantages.time_aligned_leave_one_out(returns, trajectory.valid, group_size)


def all_actions_advantage(trajectory: Trajectory, hyperparams: Hyperparams, group_size: int) -> jax.Array:
    """The exact mean over the actions at one state, of forked groups whose member i begins with action i.

        A_i = Q_i - sum_j pi(a_j | s) Q_j

    With Q_i the member's discounted return, and as `make_batch` weighs such members by pi(a_i | s), the gradient is
    sum_a pi(a | s) A(s, a) grad log pi(a | s): actions are weighed, not sampled. Only the first step has one.
    """
    if trajectory.given is None:
        raise ValueError(
            "all_actions_advantage compares all actions of a state; use it with start=forked(trunk_steps, "
            "all_actions=True), whose groups begin with them"
        )
    returns = _returns_to_go(trajectory, hyperparams)[0].reshape(-1, group_size)
    probability = jnp.exp(trajectory.log_prob[0]).reshape(-1, group_size)
    # Less the first before the mean, which makes equal returns exactly 0.
    relative = returns - returns[:, :1]
    advantage = relative - jnp.sum(probability * relative, axis=1, keepdims=True)
    return jnp.zeros_like(trajectory.reward).at[0].set(advantage.reshape(-1))


def whitened_return_advantage(trajectory: Trajectory, hyperparams: Hyperparams, group_size: int) -> jax.Array:
    """Discounted return-to-go, whitened over all steps of the batch: a baseline without groups."""
    return advantages.reinforce_plus_plus(_returns_to_go(trajectory, hyperparams), trajectory.valid)


def whitened_score_advantage(trajectory: Trajectory, hyperparams: Hyperparams, group_size: int) -> jax.Array:
    """The rollout's return, centred in its group, then whitened over all steps of the batch."""
    return advantages.reinforce_plus_plus_baseline(episode_scores(trajectory, group_size), trajectory.valid)


def gae_advantage(trajectory: Trajectory, hyperparams: Hyperparams, group_size: int) -> jax.Array:
    """Generalised advantage estimation on the values of the baseline, or else of the critic."""
    if trajectory.value is None:
        raise ValueError(
            "the advantage is relative to the values of a critic or of a baseline, and the algorithm has neither; set "
            "critic=clipped_value_loss or baseline=kernel_baseline, or use an advantage without, such as "
            "return_to_go_advantage"
        )
    return advantages.gae(
        trajectory.reward,
        trajectory.value,
        trajectory.next_value,
        trajectory.terminated,
        trajectory.truncated,
        discount=hyperparams.discount,
        gae_lambda=hyperparams.gae_lambda,
    )


def return_minus_value_advantage(trajectory: Trajectory, hyperparams: Hyperparams, group_size: int) -> jax.Array:
    """Discounted return-to-go minus the value of the baseline, or else of the critic.

    Where a limit or the window cut a return, what follows is worth what the baseline says of it.
    """
    return gae_advantage(trajectory, hyperparams.replace(gae_lambda=1.0), group_size)


# --- ratio -----------------------------------------------------------------------------------------------------------


def step_ratio(log_ratio: jax.Array, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """Each step has its own ratio."""
    return log_ratio


def _check_whole(is_whole: bool, slot: str, what: str, field: str) -> None:
    if not is_whole:
        raise ValueError(f"{slot} compares {what}, which are not kept together here; set {field}=True in the algorithm")


def sequence_ratio(log_ratio: jax.Array, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """The length-normalised ratio of the whole sequence, at each of its steps."""
    _check_whole(batch.whole.sequences, "sequence_ratio", "the steps of a sequence", "whole_sequences")
    return losses.sequence_log_ratio(log_ratio, batch.mask)


def sequence_token_ratio(log_ratio: jax.Array, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """The value of `sequence_ratio`, with each step's own gradient (GSPO-token)."""
    _check_whole(batch.whole.sequences, "sequence_token_ratio", "the steps of a sequence", "whole_sequences")
    return losses.sequence_token_log_ratio(log_ratio, batch.mask)


def geometric_mean_ratio(log_ratio: jax.Array, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """The geometric mean of the sequence's ratios, each clipped by itself, at each of its steps."""
    _check_whole(batch.whole.sequences, "geometric_mean_ratio", "the steps of a sequence", "whole_sequences")
    return losses.geometric_mean(
        log_ratio, batch.advantage, batch.mask, clip_low=hyperparams.clip_low, clip_high=hyperparams.clip_high
    )


def covariance_clipped_ratio(log_ratio: jax.Array, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """Each step's own ratio, without gradient where log-probability and advantage vary together most."""
    _check_whole(batch.whole.minibatches, "covariance_clipped_ratio", "the samples of a minibatch", "whole_minibatches")
    low, high = losses.clip_fractions(
        log_ratio, batch.advantage, clip_low=hyperparams.clip_low, clip_high=hyperparams.clip_high
    )
    selected = losses.covariance_clip(
        batch.log_prob + log_ratio,
        batch.advantage,
        batch.mask,
        jax.random.key(0),  # the samples of a minibatch come in random order already
        fraction=hyperparams.covariance_fraction,
        excluded=low | high,
    )
    return jnp.where(selected, jax.lax.stop_gradient(log_ratio), log_ratio)


# --- surrogate -------------------------------------------------------------------------------------------------------


def clipped_surrogate(log_ratio: jax.Array, advantage: jax.Array, hyperparams: Hyperparams) -> jax.Array:
    """PPO's clipped objective, with a width of its own on either side."""
    return losses.clipped_surrogate(
        log_ratio, advantage, clip_low=hyperparams.clip_low, clip_high=hyperparams.clip_high
    )


def dual_clipped_surrogate(log_ratio: jax.Array, advantage: jax.Array, hyperparams: Hyperparams) -> jax.Array:
    """PPO's clipped objective, bounded below by dual_clip times a negative advantage."""
    return losses.clipped_surrogate(
        log_ratio,
        advantage,
        clip_low=hyperparams.clip_low,
        clip_high=hyperparams.clip_high,
        dual_clip=hyperparams.dual_clip,
    )


def unclipped_surrogate(log_ratio: jax.Array, advantage: jax.Array, hyperparams: Hyperparams) -> jax.Array:
    """Ratio times advantage."""
    return losses.importance_ratio(log_ratio) * advantage


def policy_gradient_surrogate(log_ratio: jax.Array, advantage: jax.Array, hyperparams: Hyperparams) -> jax.Array:
    """Log-probability times advantage (REINFORCE): no ratio, so meant for few updates from each rollout."""
    return losses.policy_gradient_surrogate(log_ratio, advantage)


def cispo_surrogate(log_ratio: jax.Array, advantage: jax.Array, hyperparams: Hyperparams) -> jax.Array:
    """Log-probability times advantage, weighted by the clipped ratio."""
    return losses.cispo_surrogate(log_ratio, advantage, clip_low=hyperparams.clip_low, clip_high=hyperparams.clip_high)


def sapo_surrogate(log_ratio: jax.Array, advantage: jax.Array, hyperparams: Hyperparams) -> jax.Array:
    """A sigmoid of the ratio in place of its clip."""
    return losses.sapo_surrogate(
        log_ratio, advantage, tau_positive=hyperparams.sapo_tau_positive, tau_negative=hyperparams.sapo_tau_negative
    )


# --- penalties -------------------------------------------------------------------------------------------------------


def _check_reference(of_reference: jax.Array | None) -> None:
    if of_reference is None:
        raise ValueError(
            "the algorithm has a KL penalty to a reference policy, but no reference policy; set the slot reference, or "
            "write with_reference(algorithm), which sets both"
        )


def kl_to_behaviour(prediction: Prediction, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """Exact KL(behaviour || policy), a trust region around the parameters that acted."""
    return hyperparams.kl_coef * prediction.kl_behaviour


def kl_to_reference(prediction: Prediction, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """Low-variance estimate k3 of KL(policy || reference), as DeepSeekMath has it."""
    _check_reference(prediction.reference_log_prob)
    return hyperparams.kl_coef * divergences.k3(prediction.log_prob, prediction.reference_log_prob)


def exact_kl_to_reference(prediction: Prediction, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """Exact KL(policy || reference) over the action distribution."""
    _check_reference(prediction.kl_reference)
    return hyperparams.kl_coef * prediction.kl_reference


KL_PENALTIES = (kl_to_behaviour, kl_to_reference, exact_kl_to_reference)
"""Of which an algorithm has one at most."""


def covariance_kl(prediction: Prediction, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """|log-ratio| to the behaviour policy, only where log-probability and advantage vary together most."""
    _check_whole(batch.whole.minibatches, "covariance_kl", "the samples of a minibatch", "whole_minibatches")
    selected = losses.covariance_kl(
        prediction.log_prob, batch.advantage, batch.mask, fraction=hyperparams.covariance_fraction
    )
    cost = hyperparams.covariance_kl_coef * divergences.abs_k1(prediction.log_prob, batch.log_prob)
    return jnp.where(selected, cost, 0.0)


def entropy_bonus(prediction: Prediction, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """Entropy as a negative cost."""
    return -hyperparams.entropy_coef * prediction.entropy


# --- critic ----------------------------------------------------------------------------------------------------------


def clipped_value_loss(values: jax.Array, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """Squared error of the critic, predictions clipped around the behaviour critic's."""
    return losses.clipped_value_loss(values, batch.value, batch.target, clip=hyperparams.value_clip)


def plain_value_loss(values: jax.Array, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """Squared error of the critic."""
    return losses.value_loss(values, batch.target)


# --- reference -------------------------------------------------------------------------------------------------------


def frozen_reference(reference: PyTree, params: PyTree, iteration: jax.Array, hyperparams: Hyperparams) -> PyTree:
    """The initial parameters, for ever."""
    return reference


def refreshed_reference(reference: PyTree, params: PyTree, iteration: jax.Array, hyperparams: Hyperparams) -> PyTree:
    """The current parameters, taken every `reference_interval` iterations."""
    refresh = jnp.mod(iteration, hyperparams.reference_interval) == 0
    return jax.tree.map(lambda old, new: jnp.where(refresh, new, old), reference, params)


def averaged_reference(reference: PyTree, params: PyTree, iteration: jax.Array, hyperparams: Hyperparams) -> PyTree:
    """An exponential moving average of the parameters, of decay `reference_decay` per iteration."""
    decay = hyperparams.reference_decay
    return jax.tree.map(lambda old, new: decay * old + (1.0 - decay) * new, reference, params)


# --- reward ----------------------------------------------------------------------------------------------------------


def kl_penalized_reward(trajectory: Trajectory, kl: jax.Array | None, hyperparams: Hyperparams) -> jax.Array:
    """The KL penalty in the reward, in place of the loss: `kl` is the k1 estimate of the KL to the reference."""
    _check_reference(kl)
    return divergences.penalized_rewards(trajectory.reward, kl, trajectory.valid, kl_coef=hyperparams.kl_coef)


# --- kl_controller ---------------------------------------------------------------------------------------------------


def adaptive_kl(kl_coef: jax.Array, kl: jax.Array, hyperparams: Hyperparams) -> jax.Array:
    """Raises the coefficient in proportion where the measured KL is above `kl_target`, lowers it where below."""
    return divergences.adaptive_coefficient(kl_coef, kl, target=hyperparams.kl_target)

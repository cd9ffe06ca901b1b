"""Algorithms as values: a tuple of pure functions, one for each decision. A variant replaces a slot.

    DR_GRPO = GRPO._replace(advantage=group_centered_advantage, reduce=sum_over_horizon)

Every slot that weighs something reads its coefficient from the hyperparameters it is given, so all stay traced.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax import advantages, divergences, losses
from grpo_jax.groups import CONTINUE, FRESH, Start
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.types import Batch, Prediction, PyTree, Trajectory


class Algorithm(NamedTuple):
    """The slots. `[S, N]` are the samples of a batch, see `grpo_jax.types.Batch`."""

    start: Start  # where rollouts begin, and whether episodes follow each other
    advantage: Callable  # (trajectory, hyperparams, group_size) -> advantages [T, B]
    normalize: Callable | None  # (advantages [S, N], mask [S, N]) -> the same, for each minibatch; None leaves them
    ratio: Callable  # (log_ratio [S, N], batch, hyperparams) -> log-ratio that the surrogate sees [S, N]
    surrogate: Callable  # (log_ratio [S, N], advantages [S, N], hyperparams) -> objective to maximise [S, N]
    penalties: tuple[Callable, ...]  # each (prediction, batch, hyperparams) -> cost to minimise [S, N]
    reduce: Callable  # (mask [S, N]) -> weight of each sample in the loss [S, N]
    critic: Callable | None  # (values, batch, hyperparams) -> loss [S, N]; None: no critic exists
    reference: Callable | None  # (reference, params, iteration, hyperparams) -> next reference; None: none exists
    whole_sequences: bool = False  # minibatches of whole rollouts (S = T) rather than of loose steps (S = 1)


# --- advantage -------------------------------------------------------------------------------------------------------


def episode_scores(trajectory: Trajectory, group_size: int) -> jax.Array:
    """`[num_groups, group_size]`: the undiscounted return of each member's rollout."""
    return jnp.sum(trajectory.reward, axis=0, where=trajectory.valid).reshape(-1, group_size)


def _on_every_step(advantage: jax.Array, trajectory: Trajectory) -> jax.Array:
    """Outcome supervision: the advantage of a rollout `[num_groups, group_size]` is that of each of its steps."""
    return jnp.where(trajectory.valid, advantage.reshape(1, -1), 0.0)


def group_normalized_advantage(trajectory: Trajectory, hyperparams: Hyperparams, group_size: int) -> jax.Array:
    """GRPO with outcome supervision: the rollout's return, standardised in its group, at each of its steps."""
    return _on_every_step(advantages.group_normalized(episode_scores(trajectory, group_size)), trajectory)


def return_to_go_advantage(trajectory: Trajectory, hyperparams: Hyperparams, group_size: int) -> jax.Array:
    """Discounted return-to-go minus the mean of the group's others at the same step (leave-one-out)."""
    returns = advantages.discounted_returns(trajectory.reward, trajectory.ended, discount=hyperparams.discount)
    return advantages.time_aligned_leave_one_out(returns, trajectory.valid, group_size)


def whitened_return_advantage(trajectory: Trajectory, hyperparams: Hyperparams, group_size: int) -> jax.Array:
    """Discounted return-to-go, whitened over all steps of the rollout: a baseline without groups."""
    returns = advantages.discounted_returns(trajectory.reward, trajectory.ended, discount=hyperparams.discount)
    return advantages.reinforce_plus_plus(returns, trajectory.valid)


def gae_advantage(trajectory: Trajectory, hyperparams: Hyperparams, group_size: int) -> jax.Array:
    """Generalised advantage estimation on the critic's values."""
    return advantages.gae(
        trajectory.reward,
        trajectory.value,
        trajectory.next_value,
        trajectory.terminated,
        trajectory.truncated,
        discount=hyperparams.discount,
        gae_lambda=hyperparams.gae_lambda,
    )


# --- ratio and surrogate ---------------------------------------------------------------------------------------------


def step_ratio(log_ratio: jax.Array, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """Each step has its own ratio."""
    return log_ratio


def clipped_surrogate(log_ratio: jax.Array, advantage: jax.Array, hyperparams: Hyperparams) -> jax.Array:
    """PPO's clipped objective, with a width of its own on either side."""
    return losses.clipped_surrogate(
        log_ratio, advantage, clip_low=hyperparams.clip_low, clip_high=hyperparams.clip_high
    )


# --- penalties and critic --------------------------------------------------------------------------------------------


def kl_to_behaviour(prediction: Prediction, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """Exact KL(behaviour || policy), a trust region around the parameters that acted."""
    return hyperparams.kl_coef * prediction.kl_behaviour


def kl_to_reference(prediction: Prediction, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """Low-variance estimate k3 of KL(policy || reference), as DeepSeekMath has it."""
    return hyperparams.kl_coef * divergences.k3(prediction.log_prob, prediction.reference_log_prob)


def exact_kl_to_reference(prediction: Prediction, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """Exact KL(policy || reference) over the action distribution."""
    return hyperparams.kl_coef * prediction.kl_reference


def entropy_bonus(prediction: Prediction, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """Entropy as a negative cost."""
    return -hyperparams.entropy_coef * prediction.entropy


def clipped_value_loss(values: jax.Array, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """Squared error of the critic, predictions clipped around the behaviour critic's."""
    return losses.clipped_value_loss(values, batch.value, batch.target, clip=hyperparams.value_clip)


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


def with_reference(algorithm: Algorithm, reference: Callable, kl: Callable = kl_to_reference) -> Algorithm:
    """The algorithm with a reference policy and a KL penalty to it, in place of one to the behaviour policy."""
    others = tuple(penalty for penalty in algorithm.penalties if penalty is not kl_to_behaviour)
    return algorithm._replace(penalties=(kl, *others), reference=reference)


# --- the algorithms --------------------------------------------------------------------------------------------------

GRPO = Algorithm(
    start=FRESH,
    advantage=group_normalized_advantage,
    normalize=None,
    ratio=step_ratio,
    surrogate=clipped_surrogate,
    penalties=(kl_to_behaviour, entropy_bonus),
    reduce=losses.mean_over_steps,
    critic=None,
    reference=None,
)
"""Group relative policy optimisation (https://arxiv.org/abs/2402.03300), one-episode groups, outcome supervision."""

GRPO_RETURN_TO_GO = GRPO._replace(advantage=return_to_go_advantage, normalize=advantages.whiten)
"""GRPO with step-level credit: return-to-go minus the group's leave-one-out mean at the same step."""

PPO = GRPO._replace(
    start=CONTINUE,
    advantage=gae_advantage,
    normalize=advantages.whiten,
    penalties=(entropy_bonus,),
    critic=clipped_value_loss,
)
"""Proximal policy optimisation (https://arxiv.org/abs/1707.06347) with GAE and a clipped critic."""

ALGORITHMS = {"grpo": GRPO, "grpo_return_to_go": GRPO_RETURN_TO_GO, "ppo": PPO}
"""The algorithms by the names that `Config` and the command lines take."""


def name_of(algorithm: Algorithm) -> str:
    """The name it has in `ALGORITHMS`, or "custom"."""
    return next((name for name, known in ALGORITHMS.items() if known == algorithm), "custom")

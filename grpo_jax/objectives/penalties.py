"""Penalties: KL to the behaviour or a reference policy and entropy, their coefficients, and how a reference moves."""

import jax
import jax.numpy as jnp

from grpo_jax.hyperparams import Hyperparams, number
from grpo_jax.objectives.divergences import k2, k3
from grpo_jax.objectives.ratios import importance_ratio
from grpo_jax.precision import at_least_float32
from grpo_jax.types import Batch, Prediction, PyTree, Trajectory

__all__ = ["KL_PENALTIES", "EntropyHyperparams", "adaptive_coefficient", "adaptive_entropy_coefficient"]
__all__ += ["averaged_reference", "entropy_bonus", "exact_kl_to_reference", "frozen_reference"]
__all__ += ["k2_to_behaviour", "kl_penalized_reward", "kl_to_behaviour", "kl_to_reference"]
__all__ += ["refreshed_reference", "unbiased_kl_to_reference"]


def adaptive_coefficient(
    coefficient: jax.Array, kl: jax.Array, *, target: float, rate: float = 0.1, max_error: float = 0.2
) -> jax.Array:
    """One step of the proportional controller that holds the KL at a target.

        coefficient' = coefficient (1 + rate clip(kl / target - 1, -max_error, max_error))

    https://arxiv.org/abs/1909.08593, section 2.2 (rate 0.1, error clipped at 0.2); trainers that give a horizon use
    `rate = num_samples / horizon`.

    Args:
      coefficient: scalar, > 0 (0 stays 0).
      kl: scalar, measured since the last step, in nats.
      target: the KL to hold, in nats, > 0.
      rate: gain of the controller.
      max_error: limit of the relative error.

    Returns:
      The new coefficient, scalar; the old one if the KL or the new one is not finite, as NaN would stay for ever.
    """
    coefficient, kl = at_least_float32(coefficient), at_least_float32(kl)
    error = jnp.clip(kl / target - 1.0, -max_error, max_error)
    adapted = coefficient * (1.0 + rate * error)
    return jnp.where(jnp.isfinite(kl) & jnp.isfinite(adapted), adapted, coefficient)


def adaptive_entropy_coefficient(
    coefficient: jax.Array,
    entropy: jax.Array,
    *,
    target: float,
    step: float = 0.005,
    low: float = 0.0,
    high: float = 1.0,
) -> jax.Array:
    """One step of the controller that holds the entropy above a target: up by `step` where it is at most the target.

        coefficient' = clip(coefficient + (step if entropy <= target else -step), low, high)

    Skywork-OR1 (https://arxiv.org/abs/2505.22312), which applies the bonus only where the last entropy is at most the
    target. Entropy and target in nats; the old coefficient where the entropy is not finite.
    """
    coefficient, entropy = at_least_float32(coefficient), at_least_float32(entropy)
    moved = jnp.clip(coefficient + jnp.where(entropy <= target, step, -step), low, high)
    return jnp.where(jnp.isfinite(entropy), moved, coefficient)


class EntropyHyperparams(Hyperparams):
    """With the number of an algorithm with an `entropy_controller`."""

    entropy_target: float = number(0.2)
    """Entropy in nats that an adaptive entropy bonus holds; above it there is no bonus."""


def _check_reference(value: jax.Array | None) -> None:
    if value is None:
        raise ValueError(
            "the algorithm has a KL penalty to a reference policy, but no reference policy; set the slot reference, or "
            "write with_reference(algorithm), which sets both"
        )


def kl_to_behaviour(prediction: Prediction, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """Exact KL(behaviour || policy), a trust region around the parameters that acted."""
    return hyperparams.kl_coef * prediction.kl_behaviour


def kl_to_reference(prediction: Prediction, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """The estimate k3 of KL(policy || reference), as in DeepSeekMath."""
    _check_reference(prediction.reference_log_prob)
    return hyperparams.kl_coef * k3(prediction.log_prob, prediction.reference_log_prob)


def exact_kl_to_reference(prediction: Prediction, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """Exact KL(policy || reference) over the action distribution."""
    _check_reference(prediction.kl_reference)
    return hyperparams.kl_coef * prediction.kl_reference


def unbiased_kl_to_reference(prediction: Prediction, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """k3 times the step's ratio, unbiased also off-policy (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556).

    exp(log p - log b) k3(log p, log q), b the behaviour policy; the gradient flows through both factors
    """
    ratio = importance_ratio(prediction.log_prob - batch.log_prob)
    return ratio * kl_to_reference(prediction, batch, hyperparams)


def k2_to_behaviour(prediction: Prediction, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """Half the squared log-ratio to the behaviour policy: the regulariser of DRO.

    kl_coef k2(log p, log b), b the behaviour policy: DRO (https://arxiv.org/abs/2405.19107)
    """
    return hyperparams.kl_coef * k2(prediction.log_prob, batch.log_prob)


KL_PENALTIES = kl_to_behaviour, kl_to_reference, exact_kl_to_reference, unbiased_kl_to_reference, k2_to_behaviour
"""The KL penalties: an algorithm has at most one of them."""


def entropy_bonus(prediction: Prediction, batch: Batch, hyperparams: Hyperparams) -> jax.Array:
    """Entropy as a negative cost."""
    return -hyperparams.entropy_coef * prediction.entropy


def frozen_reference(reference: PyTree, params: PyTree, iteration: jax.Array, hyperparams: Hyperparams) -> PyTree:
    """The initial parameters, never changed."""
    return reference


def refreshed_reference(
    reference: PyTree, params: PyTree, iteration: jax.Array, hyperparams: Hyperparams, *, interval: int = 10
) -> PyTree:
    """The current parameters, taken every `interval` iterations."""
    refresh = iteration % interval == 0
    return jax.tree.map(lambda old, new: jnp.where(refresh, new, old), reference, params)


def averaged_reference(
    reference: PyTree, params: PyTree, iteration: jax.Array, hyperparams: Hyperparams, *, decay: float = 0.99
) -> PyTree:
    """An exponential moving average of the parameters, of this decay per iteration."""
    return jax.tree.map(lambda old, new: old + (1.0 - decay) * (new - old), reference, params)  # equal ones stay


def kl_penalized_reward(trajectory: Trajectory, kl: jax.Array | None, hyperparams: Hyperparams) -> jax.Array:
    """The KL penalty in the reward instead of the loss: it is then credited to the actions that led there.

        r'_t = r_t - kl_coef kl_t,  kl_t = k1(log b, log q), b the behaviour and q the reference policy

    RLHF (https://arxiv.org/abs/1909.08593). `kl` is `[T, B]` in nats, `kl_coef` in units of reward for each nat; 0 on
    steps that are not valid. ValueError without a reference policy.
    """
    _check_reference(kl)
    return jnp.where(trajectory.valid, trajectory.reward - hyperparams.kl_coef * kl, 0.0)

"""Features of states, `[T, B, ...]` and `[F, B, ...]`, by which baselines compare or value them."""

from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.observations import joined, leading_shape
from grpo_jax.types import PyTree, Trajectory


def observed(trajectory: Trajectory, policy: Any, params: PyTree) -> tuple[jax.Array, jax.Array]:
    """The observations themselves; several arrays are joined to one (`joined`)."""
    return joined(trajectory.observation, 2), joined(trajectory.final_observation, 2)


def policy_features(trajectory: Trajectory, policy: Any, params: PyTree) -> tuple[jax.Array, jax.Array]:
    """The features that the actor's head reads; those of a transformer are its last hidden states.

    Raises:
      ValueError: the policy has no features, or is a transformer whose rollout has more than one episode.
    """
    if policy.features is None:
        raise ValueError(
            "this policy, a network of your own, has no features for policy_features; give make_pure_policy "
            "features=..., or use `observed`"
        )
    carry = jax.tree.map(lambda leaf: leaf[0], trajectory.carry)
    begins = jnp.zeros((1, trajectory.valid.shape[1]), bool)
    if policy.max_steps is not None:
        return _transformer_features(trajectory, policy, params, carry, begins)

    def of_final(observation, carry):
        one_step = jax.tree.map(lambda leaf: leaf[None], observation)
        return policy.features(params, one_step, carry, begins)[0]

    return (
        policy.features(params, trajectory.observation, carry, trajectory.is_first),
        jax.vmap(of_final)(trajectory.final_observation, trajectory.final_carry),
    )


def _transformer_features(trajectory, policy, params, carry, begins):
    """As `policy_features`. The final carry has no cache, so the final observation is read after all others."""
    if leading_shape(trajectory.final_observation, 1) != (1,):
        raise ValueError(
            "policy_features of a transformer needs rollouts of one episode, as it reads a prompt only where a rollout "
            "begins; use one-episode groups (start=FRESH), or `observed`"
        )
    both = trajectory.observation, trajectory.final_observation
    observation = jax.tree.map(lambda *parts: jnp.concatenate(parts), *both)
    features = policy.features(params, observation, carry, jnp.concatenate([trajectory.is_first, begins]))
    return features[:-1], features[-1:]

"""Features of states, `[T, B, ...]` and `[F, B, ...]`, by which baselines compare or value them."""

from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.observations import joined
from grpo_jax.types import PyTree, Trajectory


def observed(trajectory: Trajectory, policy: Any, params: PyTree) -> tuple[jax.Array, jax.Array]:
    """The observations themselves; several arrays are joined to one (`joined`)."""
    return joined(trajectory.observation, 2), joined(trajectory.final_observation, 2)


def policy_features(trajectory: Trajectory, policy: Any, params: PyTree) -> tuple[jax.Array, jax.Array]:
    """The features that the actor's head reads."""
    if policy.features is None or policy.max_steps is not None:  # a transformer's sequences begin with the prompt
        raise ValueError(
            "this policy, a transformer or a network of your own, has no features for policy_features; give "
            "make_pure_policy features=..., or use `observed`"
        )
    carry = jax.tree.map(lambda leaf: leaf[0], trajectory.carry)
    begins = jnp.zeros((1, trajectory.valid.shape[1]), bool)

    def of_final(observation, carry):
        one_step = jax.tree.map(lambda leaf: leaf[None], observation)
        return policy.features(params, one_step, carry, begins)[0]

    return (
        policy.features(params, trajectory.observation, carry, trajectory.is_first),
        jax.vmap(of_final)(trajectory.final_observation, trajectory.final_carry),
    )

"""Features of states, `[T, B, ...]` and `[F, B, ...]`, by which baselines compare or value them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.observations import joined, leading_shape
from grpo_jax.precision import at_least_float32
from grpo_jax.types import PyTree, Trajectory


def observed(trajectory: Trajectory, policy: Any, params: PyTree) -> tuple[jax.Array, jax.Array]:
    """The observations themselves; several arrays are joined to one (`joined`)."""
    return joined(trajectory.observation, 2), joined(trajectory.final_observation, 2)


def relative_positions(
    trajectory: Trajectory, policy: Any, params: PyTree, *, reach: int = 3
) -> tuple[jax.Array, jax.Array]:
    """The observation, an image whose channels are kinds of things, and how these lie to each other, side by side.

    Sums of the pixels say where each thing is; those of `channel_correlations` also where it is beside another one.
    """

    def of(observation):
        image = joined(observation, 2)
        pixels = at_least_float32(image.reshape(*image.shape[:2], -1))
        return jnp.concatenate([pixels, channel_correlations(image, reach)], axis=-1)

    return of(trajectory.observation), of(trajectory.final_observation)


def channel_correlations(images: jax.Array, reach: int) -> jax.Array:
    """The cross-correlations of each pair of channels at small offsets.

        f_{ijd}(x) = sum_p x_i(p) x_j(p + d),  i < j,  d in {-reach, ..., reach}^2

    For channels of 0 and 1: how many things of channel j lie at the offset d from one of channel i.

    Args:
      images: `[..., height, width, channels]`, any dtype. Outside of it all is 0.
      reach: largest offset, in pixels. Static.

    Returns:
      `[..., channels (channels - 1) / 2 * (2 reach + 1)^2]`, NaN for an image with a NaN.

    Raises:
      ValueError: there are no two channels.
    """
    if images.ndim < 3 or images.shape[-1] < 2:
        raise ValueError(
            "channel_correlations compares the channels of images, [height, width, channels], but the shape is "
            f"{images.shape}; use `observed`"
        )
    first, second = np.triu_indices(images.shape[-1], 1)
    # Beyond the borders the padding is as wide as the reach, so that nothing wraps around.
    size = tuple(side + reach for side in images.shape[-3:-1])
    spectrum = jnp.fft.rfft2(jnp.moveaxis(at_least_float32(images), -1, -3), size)
    products = jnp.conj(spectrum[..., first, :, :]) * spectrum[..., second, :, :]
    offsets = np.arange(-reach, reach + 1)
    correlations = jnp.fft.irfft2(products, size)[..., offsets[:, None], offsets]
    return correlations.reshape(*images.shape[:-3], -1)


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

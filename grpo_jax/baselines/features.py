"""Features of states, `[T, B, ...]` and `[F, B, ...]`, by which baselines compare or value them."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import broadcast_to_rank

from grpo_jax.objectives.whitening import centred, std
from grpo_jax.observations import flatten_observation, leading_shape
from grpo_jax.precision import at_least_float32, exact_sum
from grpo_jax.types import PyTree, Trajectory


def observed(trajectory: Trajectory, policy: Any, params: PyTree) -> tuple[jax.Array, jax.Array]:
    """The observations themselves; several arrays are flatten_observation to one (`flatten_observation`)."""
    return flatten_observation(trajectory.observation, 2), flatten_observation(trajectory.final_observation, 2)


def relative_positions(
    trajectory: Trajectory, policy: Any, params: PyTree, *, reach: int = 3
) -> tuple[jax.Array, jax.Array]:
    """The observation, an image whose channels are kinds of things, and the things' relative positions, side by side.

    Sums of the pixels say where each thing is; sums of `channel_correlations` also where it is next to another.

    Raises:
      ValueError: an observation is no image `[height, width, channels]` of two channels or more.
    """

    def of(observation):
        image = flatten_observation(observation, 2)
        if image.ndim != 5:
            raise ValueError(
                "relative_positions needs observations that are images, [height, width, channels], but their shape is "
                f"{image.shape[2:]}; use `observed`"
            )
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
      `[..., channels (channels - 1) / 2 * (2 reach + 1)^2]`, NaN for the pairs of a channel with a NaN or an infinity.

    Raises:
      ValueError: there are no two channels.
    """
    if images.ndim < 3 or images.shape[-1] < 2:
        raise ValueError(
            "channel_correlations compares the channels of images, [height, width, channels], but the shape is "
            f"{images.shape}; use `observed`"
        )
    if images.ndim == 3:
        return _correlations(images, reach)

    def in_parts(images, most):
        rows = max(most // max(math.prod(images.shape[1:-3]), 1), 1)
        return jax.lax.map(functools.partial(_correlations, reach=reach), images, batch_size=rows)

    # As many images at a time as a cache holds the spectra of; larger parts are fewer launches.
    return jax.lax.platform_dependent(
        images, cpu=functools.partial(in_parts, most=64), default=functools.partial(in_parts, most=2**16)
    )


def _correlations(images, reach):
    """As `channel_correlations`, of all images at once: a product of spectra is the correlation's spectrum."""
    *lead, height, width, channels = images.shape
    pixels = at_least_float32(images).reshape(*lead, height * width, channels)
    to_spectrum, to_offsets = (matrix.astype(pixels.dtype) for matrix in _fourier_matrices(height, width, reach))
    real, imaginary = exact_sum("...pc,xpf->x...cf", pixels, to_spectrum)
    first, second = np.triu_indices(channels, 1)
    real_i, imaginary_i = real[..., first, :], imaginary[..., first, :]
    real_j, imaginary_j = real[..., second, :], imaginary[..., second, :]
    products = jnp.stack([real_i * real_j + imaginary_i * imaginary_j, real_i * imaginary_j - imaginary_i * real_j])
    return exact_sum("x...cf,xfd->...cd", products, to_offsets).reshape(*lead, -1)


def _fourier_matrices(height, width, reach):
    """From pixels to the real and imaginary parts of their spectrum `[2, P, F]`, and from these to offsets `[2, F, D]`.

    For images as small as a board, products with matrices are several times as fast as an FFT. Beyond the borders the
    spectrum's period is as wide as the reach, so that nothing wraps around.
    """
    periods = np.array([height + reach, width + reach])
    # The other half of the frequencies has the conjugate values, as pixels are real.
    frequencies = np.indices((periods[0], periods[1] // 2 + 1)).reshape(2, -1)
    twice = np.where((frequencies[1] == 0) | (2 * frequencies[1] == periods[1]), 1, 2)
    wave_numbers = 2 * np.pi * frequencies / periods[:, None]
    pixels = np.indices((height, width)).reshape(2, -1).T @ wave_numbers
    offsets = (np.indices((2 * reach + 1,) * 2).reshape(2, -1) - reach).T @ wave_numbers
    to_offsets = np.stack([np.cos(offsets), -np.sin(offsets)]) * twice / periods.prod()
    return np.stack([np.cos(pixels), -np.sin(pixels)]), to_offsets.swapaxes(1, 2)


def policy_features(trajectory: Trajectory, policy: Any, params: PyTree) -> tuple[jax.Array, jax.Array]:
    """The features that the actor's head reads; for a transformer, its last hidden states.

    Raises:
      ValueError: the policy has no features, or is a transformer whose rollout has more than one episode.
    """
    if policy.features is None:
        raise ValueError(
            "this policy, a custom network, has no features for policy_features; give make_pure_policy "
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


def is_usable(features: jax.Array) -> jax.Array:
    """Whether each element of the last axis, and its square, is finite."""
    return jnp.all(jnp.isfinite(jnp.square(features)), axis=-1)


LARGEST = 10.0
"""Standard deviations from the mean beyond which random features no longer tell observations apart."""


class Scaling(NamedTuple):
    """The mean and the standard deviation of each element of an observation; 1 for one that does not vary."""

    mean: jax.Array  # [E]
    deviation: jax.Array  # [E]


def scaling_of(x: jax.Array, mask: jax.Array) -> Scaling:
    """The scaling by observations `[..., E]` where the mask `[...]` is true; those that are not finite do not count."""
    x, axes = at_least_float32(x), tuple(range(mask.ndim))
    counts = (mask.astype(bool) & is_usable(x))[..., None]
    mean = jnp.sum(x, axis=axes, where=counts) / jnp.maximum(jnp.sum(counts, axis=axes), 1)
    # Not from that mean: its rounding would be the deviation of an element that does not vary.
    deviation = std(centred(x, counts, axes), counts, axes, ddof=0).reshape(mean.shape)
    return Scaling(mean, jnp.where(deviation > 0, deviation, 1.0))


def random_features(x: jax.Array, scaling: Scaling, number: int) -> jax.Array:
    """Rectified projections of observations to random directions, the same in every call.

        f_k(x) = max(0, u_k . (x - mean) / deviation + c_k),  u_k uniform on the unit sphere,  c_k uniform in [-3, 3]

    Their weighted sums are piecewise linear functions of the observation. Rahimi and Recht, Weighted sums of random
    kitchen sinks (NeurIPS 2008).

    Args:
      x: `[..., E]` observations, any dtype.
      scaling: of the E elements, such as by `scaling_of`; scaled ones are clipped to +-`LARGEST`.
      number: of features, K. Static.

    Returns:
      `[..., K]`, NaN where an observation has a NaN.
    """
    generator = np.random.default_rng(0)
    directions = generator.standard_normal((x.shape[-1], number))
    directions /= np.linalg.norm(directions, axis=0)
    offsets = generator.uniform(-3, 3, number)
    mean, deviation, offsets = (broadcast_to_rank(each, x.ndim) for each in (*scaling, offsets))
    x = jnp.clip((at_least_float32(x) - mean) / deviation, -LARGEST, LARGEST)
    return jax.nn.relu(exact_sum("...e,ek->...k", x, directions.astype(x.dtype)) + offsets.astype(x.dtype))

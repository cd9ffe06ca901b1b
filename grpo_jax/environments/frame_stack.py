"""Frame stacking: an environment whose observations are its last few observations side by side."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.environments.environment import Environment
from grpo_jax.errors import ConfigError
from grpo_jax.observations import channels_first
from grpo_jax.types import PyTree


class StackedState(NamedTuple):
    """The state of an environment with frame stacking."""

    environment: PyTree  # the state without frame stacking
    frames: PyTree  # the last k - 1 observations, side by side, oldest first


def stack_frames(environment: Environment, num_frames: int) -> Environment:
    """The environment with its last k observations side by side, as in DQN (https://doi.org/10.1038/nature14236).

        o'_t = [o_{t-k+1}, ..., o_{t-1}, o_t]

    Before the first observation of an episode lie copies of it. The frames lie along the last axis, oldest first:
    features of a vector, channels of an image, also of one with its channels first. A number, and an image without
    channels (2 axes), get an axis for them.
    Each array of an observation is stacked. All else is the environment's: rewards, ends, masks, parameters.

    Args:
      environment: any but a token environment.
      num_frames: `k`; 1 returns the environment unchanged.

    Raises:
      ConfigError: for a token environment, whose policy reads all earlier tokens.
    """
    if num_frames == 1:
        return environment
    if environment.prompt is not None:
        raise ConfigError(
            f"frame_stack={num_frames} stacks observations, but {environment.name!r} has tokens, and its policy reads "
            "all earlier ones; use frame_stack=1"
        )

    def reset(key, params):
        state, observation = environment.reset(key, params)
        stacked = jax.tree.map(lambda x: jnp.concatenate([_with_channels(x)] * num_frames, axis=-1), observation)
        return StackedState(state, _without_oldest(stacked, observation)), stacked

    def step(key, state, action, params):
        moved = environment.step(key, state.environment, action, params)
        stacked = jax.tree.map(
            lambda frames, x: jnp.concatenate([frames, _with_channels(x)], axis=-1), state.frames, moved.observation
        )
        after = StackedState(moved.state, _without_oldest(stacked, moved.observation))
        return moved._replace(state=after, observation=stacked)

    def unstacked(function):
        return function and (lambda states, params: function(states.environment, params))

    codec = environment.codec
    return environment._replace(
        reset=reset,
        step=step,
        own_codec=codec._replace(leaves=jax.tree.map(lambda leaf: leaf.stacked(num_frames), codec.leaves)),
        observation=jax.eval_shape(lambda: reset(jax.random.key(0), environment.params)[1]),
        action_mask=unstacked(environment.action_mask),
        outcome=unstacked(environment.outcome),
        forced_action=unstacked(environment.forced_action),
    )


def unstacked_state(state: PyTree) -> PyTree:
    """The state of the environment itself, such as a renderer needs; unchanged without frame stacking."""
    return state.environment if isinstance(state, StackedState) else state


def _with_channels(x: jax.Array) -> jax.Array:
    """The array with its axis for frames last: a new one for a number or for `[height, width]`."""
    if channels_first(x.shape):
        return jnp.moveaxis(x, 0, -1)
    return x[..., None] if x.ndim in (0, 2) else x


def _without_oldest(stacked: PyTree, observation: PyTree) -> PyTree:
    """The frames without the first, which is as long as an observation."""
    return jax.tree.map(lambda frames, x: frames[..., _with_channels(x).shape[-1] :], stacked, observation)

"""The one interface of every environment: a state is a value, and nothing resets by itself."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.environments.spaces import ActionSpace
from grpo_jax.types import RewardParts


class Transition(NamedTuple):
    """Where one step leads, before any reset."""

    environment: Any  # the new state
    observation: jax.Array  # of the new state, also when it is a final one
    reward: jax.Array  # float32 scalar
    terminated: jax.Array  # bool: nothing follows this state
    truncated: jax.Array  # bool: only the time limit ends the episode here
    reward_parts: RewardParts | None = None  # each [K]: what the reward is the weighted sum of, if it is of parts


class Environment(NamedTuple):
    """Pure functions of a single environment; `vmap` makes many of it."""

    name: str
    reset: Callable  # (key, params) -> state, observation
    step: Callable  # (key, state, action, params) -> Transition
    params: Mapping[str, Any]  # default value of each traced parameter, a NumPy array
    observation: jax.ShapeDtypeStruct  # of one observation
    action_space: ActionSpace
    action_mask: Callable | None  # (state, params) -> bool [num_actions]: the legal actions; None if all always are
    max_steps: int  # the time limit: an episode is truncated at this length, and never earlier
    # (state, params) -> int32 [P]: tokens that a policy reads at the start of an episode, -1 where there is none
    prompt: Callable | None = None
    task: Any = None  # of a token environment: its `tokens.Task`


def threefry(key: jax.Array) -> jax.Array:
    """A key of the generator threefry, which environments draw by, made of one of any generator.

    What others (rbg) draw under `vmap` depends on the other keys of the batch: equal keys would not draw equally, and
    different ones not always differently. One of threefry stays as it is, raw or not: environments may keep it in their
    states, and all resets and steps of a run then agree in what it is.
    """
    if str(jax.random.key_impl(key)) == "threefry2x32":
        return key
    return jax.random.wrap_key_data(jax.random.key_data(key)[..., :2], impl="threefry2x32")


def transition(
    state: Any, observation: jax.Array, reward: jax.Array, terminated: jax.Array, truncated: jax.Array
) -> Transition:
    """A transition of the promised types; an end that is both at once is a termination, as nothing follows it."""
    terminated = jnp.asarray(terminated, bool)
    return Transition(
        environment=state,
        observation=observation,
        reward=jnp.asarray(reward, jnp.float32),
        terminated=terminated,
        truncated=jnp.asarray(truncated, bool) & ~terminated,
    )

"""The environment of a token task: an action is the next token, an episode one completion."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.environments.environment import Environment, threefry, transition
from grpo_jax.environments.spaces import Discrete
from grpo_jax.environments.tokens.task import ACCURACY, ASK, END, PAD, Problem, Task, Tokens
from grpo_jax.errors import ConfigError, nearest
from grpo_jax.types import RewardParts

HELD_OUT_FRACTION = 0.1
NUM_DRAWS = 1024  # that the held-out share of the prompts is measured on


class Completion(NamedTuple):
    """The state of a token environment."""

    problem: Problem
    tokens: Tokens  # [max_length], `PAD` from `length` on
    length: jax.Array


def token_environment(task: Task, overrides: Mapping[str, Any]) -> Environment:
    """A task as an environment.

    Its traced parameters are the weight of each reward, by the reward's name, and `held_out`: 0 draws problems of the
    training prompts, 1 of the others, about a tenth of all, which training so never meets.

    Args:
      task: what is asked, and what is right.
      overrides: parameters with other default values.

    Raises:
      ConfigError: for an unknown parameter, and for a task that has only one prompt or asks nothing.
    """
    rewards = task.rewards or (ACCURACY,)
    params = {"held_out": np.int32(0)} | {reward.name: np.float32(reward.weight) for reward in rewards}
    if len(params) != 1 + len(rewards):
        raise ConfigError(f"rewards of {task.name!r} must differ in their names, which are those of their weights")
    for name in overrides:
        if name not in params:
            raise ConfigError(f"environment {task.name!r} has no parameter {name!r}: {nearest(name, params)}")
    params = {name: np.asarray(overrides.get(name, default), default.dtype) for name, default in params.items()}
    is_held_out = _held_out(task.draw, task.prompt)

    def reset(key, params):
        # Rejection: each side of the partition keeps the distribution that `draw` has on it.
        def again(carry):
            key, _ = carry
            key, key_draw = jax.random.split(key)
            return key, task.draw(key_draw)

        def on_other_side(carry):
            return is_held_out(carry[1]) != (params["held_out"] > 0)

        # A generator that draws by the first key of a vmap alone would stand still once that key's row is done.
        _, problem = jax.lax.while_loop(on_other_side, again, again((threefry(key), None)))
        nothing = jnp.full(task.max_length, PAD, jnp.int32)
        return Completion(problem, nothing, jnp.zeros((), jnp.int32)), jnp.full((), ASK, jnp.int32)

    def step(key, state, action, params):
        action = jnp.asarray(action, jnp.int32)
        after = Completion(state.problem, state.tokens.at[state.length].set(action), state.length + 1)
        terminated, truncated = action == END, after.length >= task.max_length
        # Only ends are judged, and only once: a judge on the host may be slow.
        over = (state.length >= task.max_length) | jnp.any(state.tokens == END)
        at_end = jnp.where((terminated | truncated) & ~over, after.tokens, PAD)

        def part(reward):
            judge = functools.partial(reward.function, task, state.problem)
            if reward.process:
                return judge(after.tokens) - judge(state.tokens)
            return jnp.where(at_end[0] == PAD, 0.0, judge(at_end))

        values = jnp.stack([jnp.asarray(part(reward), jnp.float32) for reward in rewards])
        weights = jnp.stack([params[reward.name] for reward in rewards])
        moved = transition(after, action, values @ weights, terminated, truncated)
        return moved._replace(reward_parts=RewardParts(values, weights))

    return Environment(
        name=f"tokens:{task.name}",
        reset=reset,
        step=step,
        params=params,
        observation=jax.ShapeDtypeStruct((), jnp.int32),
        action_space=Discrete(len(task.vocabulary)),
        action_mask=None,
        max_steps=task.max_length,
        prompt=lambda state, params: task.prompt(state.problem),
        task=task._replace(rewards=rewards),
    )


@functools.lru_cache
def _held_out(draw: Callable, prompt: Callable) -> Callable:
    """`(problem) -> bool`: whether a problem's prompt is held out. A function of the prompt alone.

    A prompt is held out if its hash is below a threshold, the tenth of the hashes of many prompts drawn: as there are
    some on either side, neither side is empty, however few prompts there are.
    """
    with jax.ensure_compile_time_eval():
        # The one generator whose streams are the same on every backend and in every version.
        keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), NUM_DRAWS)
        hashes = np.unique(jax.jit(jax.vmap(lambda key: _hash(prompt(draw(key)))))(keys))
    if len(hashes) < 2:
        raise ConfigError("the task draws one and the same prompt always, so none can be held out; let draw(key) vary")
    threshold = hashes[max(1, round(HELD_OUT_FRACTION * len(hashes)))]
    return lambda problem: _hash(prompt(problem)) < threshold


def _hash(tokens: Tokens) -> jax.Array:
    """FNV-1a over the tokens, then murmur3's mix of the bits: uint32."""
    hashed = jnp.uint32(2166136261)
    for token in jnp.unstack(tokens.astype(jnp.uint32)):
        hashed = (hashed ^ token) * jnp.uint32(16777619)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        hashed = (hashed ^ (hashed >> shift)) * jnp.uint32(factor)
    return hashed

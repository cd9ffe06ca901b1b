"""The environment of a token task: an action is the next token, an episode one completion."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.environments.environment import Environment, threefry, transition
from grpo_jax.environments.parameters import cast_parameters
from grpo_jax.environments.spaces import Discrete
from grpo_jax.environments.tokens.task import ACCURACY, ASK, END, PAD, Problem, Reward, Task, Tokens
from grpo_jax.errors import ConfigError
from grpo_jax.types import RewardParts

HELD_OUT_FRACTION = 0.1
NUM_DRAWS = 1024  # sampled prompts, for the threshold on their hashes


class Completion(NamedTuple):
    """The state of an environment whose actions are tokens."""

    problem: Problem
    tokens: Tokens  # [max_length], `PAD` from `length` on
    length: jax.Array
    found: jax.Array | tuple[()] = ()  # int32 [S] bytes of each stop string that the text ends with

    @classmethod
    def empty(cls, problem: Problem, max_length: int) -> "Completion":
        """The state before the first token."""
        return cls(problem, jnp.full(max_length, PAD, jnp.int32), jnp.zeros((), jnp.int32))

    def append(self, token: jax.Array) -> "Completion":
        """The state after one more token."""
        return self._replace(tokens=self.tokens.at[self.length].set(token), length=self.length + 1)


def token_environment(task: Task, overrides: Mapping[str, Any]) -> Environment:
    """The environment of a task.

    Its traced parameters are the weight of each reward, by the reward's name, and `held_out`: with 0 it draws problems
    with training prompts, with 1 problems with held-out prompts, about a tenth of all, which training never sees.

    Args:
      task: problems, prompts and rewards.
      overrides: new default values for parameters.

    Raises:
      ConfigError: for an unknown parameter, rewards with equal names, or a task with a single prompt.
    """
    rewards = task.rewards or (ACCURACY,)
    defaults = _parameters(task.name, rewards, overrides)
    is_held_out = _held_out(task.draw, task.prompt)
    process, at_end = (tuple(reward for reward in rewards if reward.process is paid) for paid in (True, False))

    def reset(key, params):
        problem = _draw(task.draw, is_held_out, key, params["held_out"] > 0)
        return Completion.empty(problem, task.max_length), jnp.full((), ASK, jnp.int32)

    def step(key, state, action, params):
        action = jnp.asarray(action, jnp.int32)
        after = state.append(action)
        terminated, truncated = action == END, after.length >= task.max_length
        if not process:
            return transition(after, action, 0.0, terminated, truncated)
        completions = after.tokens, state.tokens
        total, before = (_parts(task, process, state.problem, tokens, params) for tokens in completions)
        parts = RewardParts(total.values - before.values, total.weights)
        moved = transition(after, action, parts.total, terminated, truncated)
        return moved._replace(reward_parts=parts)

    def outcome(states, params):
        return jax.vmap(lambda state, params: _parts(task, at_end, state.problem, state.tokens, params))(states, params)

    def forced_action(state, params):
        return task.forced_token(state.problem, state.tokens)

    return Environment(
        name=f"tokens:{task.name}",
        reset=reset,
        step=step,
        params=defaults,
        observation=jax.ShapeDtypeStruct((), jnp.int32),
        action_space=Discrete(len(task.vocabulary)),
        action_mask=None,
        max_steps=task.max_length,
        limit_terminates=True,  # an answer that is cut has been rewarded
        prompt=lambda state, params: task.prompt(state.problem),
        task=task._replace(rewards=process + at_end),
        outcome=outcome if at_end else None,
        forced_action=forced_action if task.forced_token is not None else None,
    )


def _parts(
    task: Task, rewards: tuple[Reward, ...], problem: Problem, completion: Tokens, params: Mapping[str, Any]
) -> RewardParts:
    """The values and weights `[K]` of these rewards of a completion."""
    values = [jnp.asarray(reward.function(task, problem, completion), jnp.float32) for reward in rewards]
    return RewardParts(jnp.stack(values), jnp.stack([params[reward.name] for reward in rewards]))


def _parameters(name: str, rewards: tuple[Reward, ...], overrides: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The default value of each traced parameter."""
    params = {"held_out": np.int32(0)} | {reward.name: np.float32(reward.weight) for reward in rewards}
    if len(params) != 1 + len(rewards):
        raise ConfigError(f"rewards of {name!r} must differ in their names, which are the names of their weights")
    values = cast_parameters(overrides, {each: default.item() for each, default in params.items()}, name)
    return {each: np.asarray(values.get(each, default), default.dtype) for each, default in params.items()}


def _draw(draw: Callable, is_held_out: Callable, key: jax.Array, held_out: jax.Array) -> Problem:
    """A problem that is held out or not. Rejection sampling keeps the distribution of `draw` on either side."""

    def draw_again(carry):
        key, _ = carry
        key, key_draw = jax.random.split(key)
        return key, draw(key_draw)

    def is_rejected(carry):
        return is_held_out(carry[1]) != held_out

    # Under vmap some generators draw only from the first key, which no longer changes once the first row is done. The
    # other rows would then draw the same problem forever.
    return jax.lax.while_loop(is_rejected, draw_again, draw_again((threefry(key), None)))[1]


@functools.lru_cache
def _held_out(draw: Callable, prompt: Callable) -> Callable:
    """The function `(problem) -> bool` that says whether a problem is held out; it depends on the prompt alone.

    A prompt is held out if its hash is below a threshold: the first decile of the distinct hashes of sampled prompts.
    At least one sampled prompt lies on either side, however few prompts there are.
    """
    with jax.ensure_compile_time_eval():
        # The only generator with the same random numbers on every backend and in every version.
        keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), NUM_DRAWS)
        hashes = np.unique(jax.jit(jax.vmap(lambda key: _hash(prompt(draw(key)))))(keys))
    if len(hashes) < 2:
        raise ConfigError("the task always draws the same prompt, so none can be held out; let draw(key) vary")
    threshold = hashes[max(1, round(HELD_OUT_FRACTION * len(hashes)))]
    return lambda problem: _hash(prompt(problem)) < threshold


def _hash(tokens: Tokens) -> jax.Array:
    """The hash FNV-1a of the tokens, finished with murmur3's mixing of the bits: uint32."""
    hashed = jnp.uint32(2166136261)
    for token in jnp.unstack(tokens.astype(jnp.uint32)):
        hashed = (hashed ^ token) * jnp.uint32(16777619)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        hashed = (hashed ^ (hashed >> shift)) * jnp.uint32(factor)
    return hashed

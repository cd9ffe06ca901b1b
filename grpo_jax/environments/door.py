"""The door for environments: all that have gymnax's interface come in here, checked in a trial on shapes."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.environments.casting import as_values, cast_like, without_weak_type
from grpo_jax.environments.codec import Codec, action_codec, observation_codec, some_action
from grpo_jax.environments.environment import Environment, Transition, transition
from grpo_jax.environments.interface import env_name, naming, overridden_params, stepped
from grpo_jax.environments.parameters import LIMIT, cast_parameter
from grpo_jax.environments.spaces import Discrete
from grpo_jax.errors import ConfigError


def from_gymnax(env: Any, overrides: Mapping[str, Any]) -> Environment:
    """The `Environment` of an object with gymnax's interface.

    Every numeric field of its parameters is traced, except for the time limit and for fields that the environment uses
    as Python values, in shapes, loops or branches.

    Args:
      env: has `default_params`, a dataclass with `max_steps_in_episode`; `action_space(params)`, a space of gymnax, of
        gymnasium or an `ActionSpace`; `reset_env(key, params) -> observation, state`; `is_truncated(state, params)`;
        and `step_env(key, state, action, params) -> observation, state, reward, terminated, info`, which neither resets
        nor checks the time limit. Optional: `action_mask(state, params) -> bool [num_actions]`, the legal actions;
        `outcome(states, params)`, `forced_action(state, params)`, `limit_terminates` and `can_diverge`, as in
        `Environment`; and `on_host`, whether any of them calls the host.
      overrides: new default values for fields of the parameters.

    Raises:
      ConfigError: with the name and the part: if part of the interface is missing, cannot be traced or returns
        something else, for unsupported spaces, parameters or limits, or if the types of states or observations after a
        step are not those after a reset.
    """
    name = env_name(env)
    defaults = overridden_params(env, overrides)
    max_steps = cast_parameter(getattr(defaults, LIMIT), 0, LIMIT)  # in some of gymnax's environments it is a float
    if max_steps < 1:
        raise ConfigError(f"{LIMIT}={max_steps} of {name!r} leaves no step; write env_params={{'{LIMIT}': 100}}, say")
    with naming("action_space", name):
        action_space, decode = action_codec(env.action_space(defaults), name)
    with naming("reset_env", name):
        first = jax.eval_shape(lambda key: _reset(env, key, defaults)[0], jax.random.key(0))
    codec = Codec(observation_codec(env, defaults, first, name), decode)
    if hasattr(env, "action_mask") and not isinstance(action_space, Discrete):
        raise ConfigError(f"{name!r} has an action_mask, which only Discrete actions can have")

    def full(params):
        return dataclasses.replace(defaults, **params)

    def encode(observation):
        return codec.encode(cast_like(observation, first, f"the observation of {name!r}"))

    def reset(key, params):
        with naming("reset_env", name):
            observation, state = _reset(env, key, full(params))
            return jax.tree.map(without_weak_type, state), encode(observation)

    def step(key, state, action, params):
        params = full(params)
        with naming("step_env", name):
            moved = _step(env, key, state, decode(action), params)
            after = cast_like(moved.state, state, f"the state of {name!r}")
            made = transition(after, encode(moved.observation), moved.reward, moved.terminated, moved.truncated)
            return made._replace(info=moved.info)

    def optional(part):
        function = getattr(env, part, None)
        return None if function is None else lambda state, params: function(state, full(params))

    mask = optional("action_mask")
    action_mask = mask and (lambda state, params: jnp.asarray(mask(state, params), bool))

    def trial(params):
        key, action = jax.eval_shape(lambda: (jax.random.key(0), some_action(action_space)))
        state, observation = jax.eval_shape(reset, key, params)
        jax.eval_shape(step, key, state, action, params)
        if action_mask:
            with naming("action_mask", name):
                shape = jax.eval_shape(action_mask, state, params).shape
            if shape != (action_space.num_actions,):
                raise ConfigError(f"action_mask of {name!r} has shape {shape}; return [{action_space.num_actions}]")
        return observation

    params = _traceable(trial, defaults)
    observation = trial(params)
    return Environment(
        name=name,
        reset=reset,
        step=step,
        params=params,
        observation=jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), observation),
        action_space=action_space,
        action_mask=action_mask,
        max_steps=max_steps,
        limit_terminates=getattr(env, "limit_terminates", False),
        on_host=getattr(env, "on_host", False),
        outcome=optional("outcome"),
        forced_action=optional("forced_action"),
        can_diverge=getattr(env, "can_diverge", False),
        own_codec=codec,
    )


def _scalar(value: Any, part: str, name: str) -> jax.Array:
    """The number that a part gives, or a ConfigError."""
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{part} of {name!r} is {value!r}; return a number") from error
    if array.shape or not jnp.isrealobj(array):
        raise ConfigError(f"{part} of {name!r} is {array.dtype}{list(array.shape)}; return a scalar, as x[0] is")
    return array


def _reset(env: Any, key: jax.Array, params: Any) -> tuple:
    return as_values(env.reset_env(key, params), ("observation", "state"), f"reset_env of {env_name(env)!r}")


def _step(env: Any, key: jax.Array, state: Any, action: Any, params: Any) -> Transition:
    """What a step gives, with scalars for reward and ends, and the arrays and numbers of its info."""
    observation, state, *numbers, info = stepped(env, key, state, action, params)
    names = "the reward", "terminated", "is_truncated"
    numbers = [_scalar(number, part, env_name(env)) for number, part in zip(numbers, names, strict=True)]
    if not isinstance(info, Mapping | None):
        raise ConfigError(f"the info of {env_name(env)!r} is {type(info).__name__}; return a dict, which may be empty")
    kinds = jax.Array | np.ndarray | np.generic | bool | int | float  # `vmap` would refuse others
    info = {entry: value for entry, value in (info or {}).items() if isinstance(value, kinds)}
    return Transition(state, observation, *numbers, info=info)


def _traceable(trial: Callable, defaults: Any) -> dict[str, np.ndarray]:
    """The numeric fields for which `trial(params)` accepts traced values, with their default values."""
    values = {
        field.name: getattr(defaults, field.name)
        for field in dataclasses.fields(defaults)
        if field.name != LIMIT and field.metadata.get("pytree_node", True)
    }
    # NumPy arrays: an environment may be made while JAX is tracing, and a JAX array would then be a tracer.
    numeric = {
        name: np.asarray(value, jnp.result_type(value))
        for name, value in values.items()
        if isinstance(value, (bool, int, float, np.generic, np.ndarray, jax.Array))
    }

    def can_trace(params):
        try:
            trial(params)
        except ConfigError as error:
            if isinstance(error.__cause__, TypeError | IndexError):  # of JAX, where a Python value is required
                return False
            raise
        return True

    if can_trace(numeric):
        return numeric
    return {name: value for name, value in numeric.items() if can_trace({name: value})}

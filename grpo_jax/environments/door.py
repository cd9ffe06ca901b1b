"""The door for environments: all that have gymnax's interface come in here, checked in a trial on shapes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.environments.casting import as_values, cast_like
from grpo_jax.environments.codec import Codec, observation_codec
from grpo_jax.environments.environment import Environment, transition
from grpo_jax.environments.interface import SIX, env_name, naming, opened, overridden_params
from grpo_jax.environments.parameters import LIMIT, cast_parameter
from grpo_jax.environments.spaces import Discrete, action_codec, some_action
from grpo_jax.environments.time_limits import checked_limit
from grpo_jax.errors import ConfigError, user_code
from grpo_jax.types import PyTree


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
    defaults, whole = overridden_params(env, overrides), opened(env)
    is_known = type(env).__module__.startswith(("gymnax.", "grpo_jax."))
    max_steps = cast_parameter(getattr(defaults, LIMIT), 0, LIMIT)  # in some of gymnax's environments it is a float
    if max_steps < 1:
        own = f"HostEnvironment({name}, max_steps=100), " if getattr(env, "on_host", False) else ""
        raise ConfigError(
            f"{LIMIT}={max_steps} of {name!r} leaves no step; write {own}env_params={{'{LIMIT}': 100}} or --env-params "
            f"{LIMIT}=100, say"
        )
    if not callable(env.action_space):
        raise ConfigError(f"action_space of {name!r} is a value; write a method, def action_space(self, params)")
    with naming("action_space", name):
        action_space, decode = action_codec(env.action_space(defaults), name)
    if hasattr(env, "action_mask") and not isinstance(action_space, Discrete):
        raise ConfigError(f"{name!r} has an action_mask, which only Discrete actions can have")

    def full(params):
        return dataclasses.replace(defaults, **params)

    def begin(key, params):
        with naming("reset_env", name):
            return as_values(whole.reset(key, full(params)), SIX[:2], f"reset of {name!r}")

    first = jax.eval_shape(lambda key: begin(key, {})[0], jax.random.key(0))
    codec = Codec(observation_codec(env, defaults, first, name, is_known), decode)

    def encode(observation):
        return codec.encode(cast_like(observation, first, f"the observation of {name!r}"))

    def reset(key, params):
        observation, state = begin(key, params)
        with user_code(f"the state of {name!r} fails", "; make its class a @flax.struct.dataclass of arrays"):
            state = jax.tree.map(jnp.asarray, state)  # and without weak types, which would trigger a second compile
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, leaf.dtype), state), encode(observation)

    def step(key, state, action, params):
        with naming("step_env", name):
            returned = as_values(whole.step(key, state, decode(action), full(params)), SIX, f"step of {name!r}")
            observation, after, *numbers, info = returned
            after = cast_like(after, state, f"the state of {name!r}")
            numbers = [*map(_scalar, numbers, ("the reward", "terminated", "is_truncated"), (name,) * 3)]
            if numbers[0].dtype == bool and jnp.issubdtype(numbers[1].dtype, jnp.floating):
                raise ConfigError(f"step_env of {name!r} returns terminated before the reward; swap them")
            return transition(after, encode(observation), *numbers)._replace(info=_arrays(info, name))

    def optional(part):
        function = getattr(env, part, None)
        return None if function is None else lambda state, params: function(state, full(params))

    mask = optional("action_mask")
    made = Environment(
        name=name,
        reset=reset,
        step=step,
        params={},
        observation=first,
        action_space=action_space,
        action_mask=mask and (lambda state, params: jnp.asarray(mask(state, params), bool)),
        max_steps=max_steps,
        limit_terminates=getattr(env, "limit_terminates", False),
        on_host=getattr(env, "on_host", False),
        outcome=optional("outcome"),
        forced_action=optional("forced_action"),
        can_diverge=getattr(env, "can_diverge", False),
        own_codec=codec,
    )
    params = _traceable(made, defaults)
    made = made._replace(params=params, observation=_trial(made, params))
    if mask and not (is_known or made.on_host):
        with jax.ensure_compile_time_eval():
            first_mask = jax.jit(lambda key: made.action_mask(made.reset(key, params)[0], params))(jax.random.key(0))
        if not first_mask.any():
            raise ConfigError(f"action_mask of {name!r} has no legal action after a reset; True is a legal one")
    return made if is_known else checked_limit(made, whole, defaults)


def _trial(made: Environment, params: Mapping[str, Any]) -> PyTree:
    """Runs all parts on shapes with these parameters; shape and dtype of each array of an observation."""
    key, action = jax.eval_shape(lambda: (jax.random.key(0), some_action(made.action_space)))
    state, observation = jax.eval_shape(made.reset, key, params)
    jax.eval_shape(made.step, key, state, action, params)
    if made.action_mask:
        with naming("action_mask", made.name):
            shape = jax.eval_shape(made.action_mask, state, params).shape
        if shape != (num_actions := made.action_space.num_actions,):
            raise ConfigError(f"action_mask of {made.name!r} has shape {shape}; return [{num_actions}]")
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), observation)


def _scalar(value: Any, part: str, name: str) -> jax.Array:
    """The number that a part gives, or a ConfigError."""
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{part} of {name!r} is {value!r}; return a number") from error
    if array.shape or not jnp.isrealobj(array):
        raise ConfigError(f"{part} of {name!r} is {array.dtype}{list(array.shape)}; return a scalar, as x[0] is")
    return array


def _arrays(info: Any, name: str) -> dict[str, Any]:
    """The arrays and numbers of an info."""
    if not isinstance(info, Mapping | None):
        raise ConfigError(f"the info of {name!r} is {type(info).__name__}; return a dict, which may be empty")
    kinds = jax.Array | np.ndarray | np.generic | bool | int | float  # `vmap` would refuse others
    return {entry: value for entry, value in (info or {}).items() if isinstance(value, kinds)}


def _traceable(made: Environment, defaults: Any) -> dict[str, np.ndarray]:
    """The numeric fields for which the trial accepts traced values, with their default values."""
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
            _trial(made, params)
        except ConfigError as error:
            if isinstance(error.__cause__, TypeError | IndexError):  # of JAX, where a Python value is required
                return False
            raise
        return True

    if can_trace(numeric):
        return numeric
    return {name: value for name, value in numeric.items() if can_trace({name: value})}

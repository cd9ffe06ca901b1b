"""gymnax behind `Environment`. gymnax itself is imported only when one of its own environments is asked for."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.environments.environment import Environment, transition
from grpo_jax.environments.parameters import as_dtype
from grpo_jax.environments.spaces import ActionSpace, Box, Discrete, MultiDiscrete
from grpo_jax.errors import ConfigError, nearest

LIMIT = "max_steps_in_episode"
"""The parameter that is an environment's time limit; it sizes rollouts, so it is static."""

_INTERFACE = ("default_params", "action_space", "reset_env", "step_env", "is_truncated")


def from_gymnax(env: Any, overrides: Mapping[str, Any]) -> Environment:
    """Any object with gymnax's interface.

    Every numeric field of its parameters is traced, but for the time limit and those that the environment uses as
    Python values, in shapes, loops or branches.

    Args:
      env: has `default_params`, a dataclass with `max_steps_in_episode`; `action_space(params)`, one of gymnax's or of
        ours; `reset_env(key, params) -> observation, state`; `is_truncated(state, params)`; and
        `step_env(key, state, action, params) -> observation, state, reward, terminated, info`, which neither resets
        nor looks at the limit. Where some actions are illegal, `action_mask(state, params) -> bool [num_actions]`.
      overrides: fields of the parameters with other default values.

    Raises:
      ConfigError: for missing parts of the interface, and for spaces, parameters and limits that are of no use.
    """
    defaults = overridden_params(env, overrides)
    max_steps = _of_type(0, getattr(defaults, LIMIT), LIMIT)  # a float in some of gymnax's
    if max_steps < 1:
        raise ConfigError(f"{LIMIT}={max_steps} of {name_of(env)!r} leaves no step; use at least 1")
    action_space, act = _actions(env.action_space(defaults), name_of(env))
    encode = _encoder(env, defaults)
    mask = getattr(env, "action_mask", None)
    if mask is not None and not isinstance(action_space, Discrete):
        raise ConfigError(f"{name_of(env)!r} has an action_mask, which only Discrete actions can have")

    def full(params):
        return dataclasses.replace(defaults, **params)

    def reset(key, params):
        observation, state = env.reset_env(key, full(params))
        return jax.tree.map(_strong, state), encode(observation)

    def step(key, state, action, params):
        params = full(params)
        observation, after, reward, terminated, _ = env.step_env(key, state, act(action), params)
        # Some environments change dtypes from reset to step, which a scan refuses: what reset gives holds.
        after = jax.tree.map(lambda leaf, like: jnp.asarray(leaf, like.dtype), after, state)
        return transition(after, encode(observation), reward, terminated, env.is_truncated(after, params))

    def action_mask(state, params):
        return jnp.asarray(mask(state, full(params)), bool)

    def play(params):
        state, observation = reset(jax.random.key(0), params)
        step(jax.random.key(0), state, _some_action(action_space), params)
        return observation if mask is None else (action_mask(state, params), observation)[1]

    params = _traceable(play, defaults)
    observation = jax.eval_shape(play, params)
    return Environment(
        name=name_of(env),
        reset=reset,
        step=step,
        params=params,
        observation=jax.ShapeDtypeStruct(observation.shape, observation.dtype),
        action_space=action_space,
        action_mask=None if mask is None else action_mask,
        max_steps=max_steps,
    )


def registered(name: str) -> Any:
    """The object that gymnax has under a name."""
    import gymnax  # takes seconds, so not before it is needed

    if name not in gymnax.registered_envs:
        raise ConfigError(
            f"unknown environment {name!r}: {nearest(name, gymnax.registered_envs)} (one of your own is written "
            "'package.module:Name')"
        )
    try:
        return gymnax.make(name)[0]
    except OSError as error:  # MNISTBandit's images
        raise ConfigError(f"{name!r} needs data that could not be downloaded: {error}") from error


def name_of(env: Any) -> str:
    """What an object with gymnax's interface is called."""
    return getattr(env, "name", type(env).__name__)


def overridden_params(env: Any, overrides: Mapping[str, Any]) -> Any:
    """The parameters of an object with gymnax's interface, with the overrides in place."""
    missing = [part for part in _INTERFACE if not hasattr(env, part)]
    if missing:
        raise ConfigError(
            f"environment={env!r} does not have gymnax's interface: it lacks {', '.join(missing)}; give a name such as "
            "'CartPole-v1', or an object as docs/environments.md describes it"
        )
    params = env.default_params
    fields = {field.name for field in dataclasses.fields(params)} if dataclasses.is_dataclass(params) else set()
    if LIMIT not in fields:
        raise ConfigError(f"default_params of {name_of(env)!r} must be a dataclass with a field {LIMIT}")
    for field in overrides:
        if field not in fields:
            raise ConfigError(f"environment {name_of(env)!r} has no parameter {field!r}: {nearest(field, fields)}")
    return dataclasses.replace(params, **{k: _of_type(getattr(params, k), v, k) for k, v in overrides.items()})


def _of_type(default: Any, value: Any, field: str) -> Any:
    """An override as the default is: integers stay integers, whatever a command line made of them."""
    if isinstance(default, (bool, int, float, str)):
        kind = type(default)
        if kind is bool and value not in (0, 1) or kind is int and not float(value).is_integer():
            raise ConfigError(f"{field}={value!r} must be {'0 or 1' if kind is bool else 'a whole number'}")
        return kind(value)
    if not isinstance(default, (jax.Array, np.ndarray)):
        return value
    value = as_dtype(field, value, default.dtype)
    if value.shape != default.shape:
        raise ConfigError(f"{field} has shape {default.shape}, and was given shape {value.shape}")
    return value


def _traceable(play: Callable, defaults: Any) -> dict[str, np.ndarray]:
    """The numeric fields that `play(params)` takes traced, with their default values."""
    values = {
        field.name: getattr(defaults, field.name)
        for field in dataclasses.fields(defaults)
        if field.name != LIMIT and field.metadata.get("pytree_node", True)
    }
    # NumPy arrays, as these are made wherever an environment is, also while something is being traced.
    numeric = {
        name: np.asarray(value, jnp.result_type(value))
        for name, value in values.items()
        if isinstance(value, (bool, int, float, np.generic, np.ndarray, jax.Array))
    }

    def takes(params):
        try:
            jax.eval_shape(play, params)
        except (TypeError, IndexError):  # what JAX raises where a traced value stands for a Python one
            return False
        return True

    if takes(numeric):
        return numeric
    return {name: value for name, value in numeric.items() if takes({name: value})}


def _actions(space: Any, name: str) -> tuple[ActionSpace, Callable]:
    """The space in our words, and what makes an action of it into one that gymnax takes."""
    if isinstance(space, ActionSpace):
        return space, lambda action: action
    if hasattr(space, "n"):
        return Discrete(int(space.n)), lambda action: action
    if hasattr(space, "low"):
        low, high = (np.broadcast_to(bound, space.shape).reshape(-1) for bound in (space.low, space.high))
        return Box(tuple(low.tolist()), tuple(high.tolist())), lambda action: action.reshape(space.shape)
    parts = getattr(space, "spaces", None)
    if isinstance(parts, (tuple, list)) and all(hasattr(part, "n") for part in parts):
        return MultiDiscrete(tuple(int(part.n) for part in parts)), lambda action: tuple(action)
    raise ConfigError(f"environment {name!r} has actions in {space}; known are Discrete, Box and Tuples of Discrete")


def _some_action(space: ActionSpace) -> jax.Array:
    match space:
        case Box(low, high):
            return jnp.clip(jnp.zeros(len(low)), jnp.array(low), jnp.array(high))
        case MultiDiscrete(num_actions):
            return jnp.zeros(len(num_actions), jnp.int32)
    return jnp.zeros((), jnp.int32)


def _encoder(env: Any, defaults: Any) -> Callable:
    """What makes gymnax's observation into ours: one array of one dtype; an integer that names a state is one-hot."""
    first = jax.eval_shape(lambda key: env.reset_env(key, defaults)[0], jax.random.key(0))
    if not isinstance(first, jax.ShapeDtypeStruct):
        raise ConfigError(f"{name_of(env)!r} observes {first}; an observation must be one array: concatenate its parts")
    if first.shape == () and jnp.issubdtype(first.dtype, jnp.integer):
        if not hasattr(env, "observation_space"):
            raise ConfigError(
                f"{name_of(env)!r} observes an integer, and does not say of how many; give it an "
                "observation_space(params) with n, or observe an array"
            )
        num_states = int(env.observation_space(defaults).n)
        return lambda observation: jax.nn.one_hot(observation, num_states)
    # MinAtar's observations are 0 or 1: a byte holds them, at a quarter of the memory traffic.
    dtype = jnp.uint8 if name_of(env).endswith("-MinAtar") else first.dtype
    return lambda observation: jnp.asarray(observation, dtype)


def _strong(leaf: Any) -> jax.Array:
    """The leaf without a weak type, which would trigger a second compile."""
    leaf = jnp.asarray(leaf)
    return jnp.asarray(leaf, leaf.dtype)

"""Adapts gymnax's interface to `Environment`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.environments.casting import cast_like, without_weak_type
from grpo_jax.environments.environment import Environment, transition
from grpo_jax.environments.parameters import cast_parameter
from grpo_jax.environments.spaces import ActionSpace, Box, Discrete, MultiDiscrete
from grpo_jax.errors import ConfigError, nearest

LIMIT = "max_steps_in_episode"
"""Name of the parameter with the time limit. It is static, as the length of rollouts depends on it."""

_INTERFACE = ("default_params", "action_space", "reset_env", "step_env", "is_truncated")


def from_gymnax(env: Any, overrides: Mapping[str, Any]) -> Environment:
    """The `Environment` of an object with gymnax's interface.

    Every numeric field of its parameters is traced, except for the time limit and for fields that the environment uses
    as Python values, in shapes, loops or branches.

    Args:
      env: has `default_params`, a dataclass with `max_steps_in_episode`; `action_space(params)`, a space of gymnax or
        an `ActionSpace`; `reset_env(key, params) -> observation, state`; `is_truncated(state, params)`; and
        `step_env(key, state, action, params) -> observation, state, reward, terminated, info`, which neither resets
        nor checks the time limit. Optional: `action_mask(state, params) -> bool [num_actions]`, the legal actions;
        `outcome(states, params)`, `forced_action(state, params)`, `limit_terminates` and `can_diverge`, as in
        `Environment`; and `on_host`, whether any of them calls the host.
      overrides: new default values for fields of the parameters.

    Raises:
      ConfigError: if part of the interface is missing, for unsupported spaces, parameters or limits, if a step does not
        return five values, or if the types of states or observations after it are not those after a reset.
    """
    name = env_name(env)
    defaults = overridden_params(env, overrides)
    max_steps = cast_parameter(getattr(defaults, LIMIT), 0, LIMIT)  # in some of gymnax's environments it is a float
    if max_steps < 1:
        raise ConfigError(f"{LIMIT}={max_steps} of {name!r} leaves no step; write env_params={{'{LIMIT}': 100}}, say")
    action_space, to_gymnax = gymnax_actions(env.action_space(defaults), name)
    encode = _encoder(env, defaults)
    if hasattr(env, "action_mask") and not isinstance(action_space, Discrete):
        raise ConfigError(f"{name!r} has an action_mask, which only Discrete actions can have")

    def full(params):
        return dataclasses.replace(defaults, **params)

    def reset(key, params):
        observation, state = env.reset_env(key, full(params))
        return jax.tree.map(without_weak_type, state), encode(observation)

    def step(key, state, action, params):
        params = full(params)
        returned = env.step_env(key, state, to_gymnax(action), params)
        observation, after, reward, terminated, info = _five(returned, name)
        after = cast_like(after, state, f"the state of {name!r}")
        truncated = env.is_truncated(after, params)
        return transition(after, encode(observation), reward, terminated, truncated)._replace(info=_numbers(info))

    def optional(part):
        function = getattr(env, part, None)
        return None if function is None else lambda state, params: function(state, full(params))

    mask = optional("action_mask")
    action_mask = mask and (lambda state, params: jnp.asarray(mask(state, params), bool))

    def play(params):
        state, observation = reset(jax.random.key(0), params)
        step(jax.random.key(0), state, some_action(action_space), params)
        if action_mask:
            action_mask(state, params)
        return observation

    params = _traceable(play, defaults)
    observation = jax.eval_shape(play, params)
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
    )


def _five(returned: tuple, name: str) -> tuple:
    """What a step returned, if that is five values."""
    if len(returned) != 5:
        raise ConfigError(
            f"step_env of {name!r} returns {len(returned)} values; return observation, state, reward, terminated, "
            "info (the time limit is is_truncated's, and info may be an empty dict)"
        )
    return returned


def _numbers(info: Mapping[str, Any] | None) -> dict[str, Any]:
    """The arrays and numbers of an info; it may hold anything else, which `vmap` would refuse."""
    kinds = jax.Array | np.ndarray | np.generic | bool | int | float
    return {name: value for name, value in (info or {}).items() if isinstance(value, kinds)}


def env_name(env: Any) -> str:
    """The name of an object with gymnax's interface."""
    return getattr(env, "name", type(env).__name__)


def overridden_params(env: Any, overrides: Mapping[str, Any]) -> Any:
    """The default parameters of an object with gymnax's interface, with some fields overridden."""
    missing = [part for part in _INTERFACE if not hasattr(env, part)]
    if missing:
        raise ConfigError(
            f"environment={env!r} does not have gymnax's interface: it lacks {', '.join(missing)}; use a name such as "
            "'CartPole-v1', or an object with the interface that `grpo-jax docs environments` describes"
        )
    params = env.default_params
    fields = {field.name for field in dataclasses.fields(params)} if dataclasses.is_dataclass(params) else set()
    if LIMIT not in fields:
        raise ConfigError(f"default_params of {env_name(env)!r} must be a dataclass with a field {LIMIT}")
    for field in overrides:
        if field not in fields:
            raise ConfigError(f"environment {env_name(env)!r} has no parameter {field!r}: {nearest(field, fields)}")
    with jax.ensure_compile_time_eval():  # a cached environment must hold no tracer
        return dataclasses.replace(
            params, **{k: cast_parameter(v, getattr(params, k), k) for k, v in overrides.items()}
        )


def _traceable(play: Callable, defaults: Any) -> dict[str, np.ndarray]:
    """The numeric fields for which `play(params)` accepts traced values, with their default values."""
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
            jax.eval_shape(play, params)
        except (TypeError, IndexError):  # JAX raises these where a Python value is required
            return False
        return True

    if can_trace(numeric):
        return numeric
    return {name: value for name, value in numeric.items() if can_trace({name: value})}


def gymnax_actions(space: Any, name: str) -> tuple[ActionSpace, Callable]:
    """The `ActionSpace` of a space of gymnax, and the function from its actions to gymnax's."""
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
    raise ConfigError(f"environment {name!r} has actions in {space}; use Discrete, Box or a Tuple of Discrete")


def some_action(space: ActionSpace) -> jax.Array:
    """An action in the space: 0, or the nearest one."""
    match space:
        case Box(low, high):
            return jnp.clip(jnp.zeros(len(low)), jnp.array(low), jnp.array(high))
        case MultiDiscrete(num_actions):
            return jnp.zeros(len(num_actions), jnp.int32)
    return jnp.zeros((), jnp.int32)


def _encoder(env: Any, defaults: Any) -> Callable:
    """The function that gives the arrays of an observation fixed dtypes; integer scalars become one-hot."""
    first = jax.eval_shape(lambda key: env.reset_env(key, defaults)[0], jax.random.key(0))
    if not jax.tree.leaves(first):
        raise ConfigError(f"{env_name(env)!r} observes {first}; an observation must have at least one array")

    def leaf_encoder(path, leaf):
        if leaf.shape == () and jnp.issubdtype(leaf.dtype, jnp.integer):
            num_states = _num_states(env, defaults, path)
            return lambda x: jax.nn.one_hot(x, num_states)
        # These observations are 0 or 1: bytes need a quarter of the memory traffic. A GPU's matrix products read int8
        # without a conversion before them, but not uint8.
        dtype = jnp.int8 if env_name(env).endswith(("-MinAtar", "Pong-misc")) else leaf.dtype
        return lambda x: jnp.asarray(x, dtype)

    encoders = jax.tree_util.tree_map_with_path(leaf_encoder, first)

    def encode(observation):
        observation = cast_like(observation, first, f"the observation of {env_name(env)!r}")
        return jax.tree.map(lambda encode_leaf, x: encode_leaf(x), encoders, observation)

    return encode


def _num_states(env: Any, defaults: Any, path: tuple) -> int:
    """The number of values of an observed integer, from the part of the observation space at this path."""
    try:
        space = env.observation_space(defaults)
        for entry in path:
            key = next(getattr(entry, name) for name in ("key", "idx", "name") if hasattr(entry, name))
            space = getattr(space, "spaces", space)[key]
        return int(space.n)
    except (AttributeError, IndexError, KeyError, NotImplementedError, TypeError) as error:
        raise ConfigError(
            f"{env_name(env)!r} observes an integer of unknown range{jax.tree_util.keystr(path)}; give it an "
            "observation_space(params) with n, or observe an array"
        ) from error

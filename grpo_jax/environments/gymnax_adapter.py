"""gymnax behind `Environment`. The only module that imports gymnax, and only when an environment is made."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.environments.environment import Environment, Transition
from grpo_jax.errors import ConfigError, nearest
from grpo_jax.spaces import Discrete


def make_environment(environment: str | Any, params: Mapping[str, float] | None = None) -> Environment:
    """An environment by its gymnax name, or from an object with gymnax's interface.

    Args:
      environment: a name such as "CartPole-v1", or a `gymnax.environments.environment.Environment`.
      params: fields of the environment's parameters to override, such as `{"max_steps_in_episode": 200}`.

    Raises:
      ConfigError: an unknown name or parameter (with the nearest known ones), or an action space without a policy.
    """
    env, env_params = gymnax_environment(environment, params or {})
    action_space = env.action_space(env_params)
    if not hasattr(action_space, "n"):
        raise ConfigError(
            f"environment {env.name!r} has {type(action_space).__name__} actions, and only policies for Discrete "
            "actions exist so far; choose an environment with discrete actions, such as 'CartPole-v1'"
        )

    max_steps = int(env_params.max_steps_in_episode)
    if max_steps < 1:
        raise ConfigError(f"max_steps_in_episode={max_steps} of {env.name!r} leaves no step; use at least 1")

    # MinAtar's observations are 0 or 1: a byte holds them, at a quarter of the memory traffic.
    observation_type = jnp.uint8 if env.name.endswith("-MinAtar") else None

    def reset(key):
        observation, state = env.reset_env(key, env_params)
        return jax.tree.map(_strong, state), _strong(jnp.asarray(observation, observation_type))

    state_type, observation_type = jax.eval_shape(reset, jax.random.key(0))

    def step(key, state, action):
        observation, state, reward, terminated, _ = env.step_env(key, state, action, env_params)
        # Some environments change dtypes from reset to step, which a scan refuses: what reset gives holds.
        state = jax.tree.map(lambda leaf, like: jnp.asarray(leaf, like.dtype), state, state_type)
        return Transition(
            environment=state,
            observation=jnp.asarray(observation, observation_type.dtype),
            reward=jnp.asarray(reward, jnp.float32),
            terminated=jnp.asarray(terminated, bool),
            truncated=jnp.asarray(env.is_truncated(state, env_params), bool),
        )

    return Environment(
        name=env.name,
        reset=reset,
        step=step,
        observation=jax.ShapeDtypeStruct(observation_type.shape, observation_type.dtype),
        action_space=Discrete(int(action_space.n)),
        max_steps=max_steps,
    )


def gymnax_environment(environment: str | Any, params: Mapping[str, float]) -> tuple[Any, Any]:
    """The gymnax object and its parameters, with the overrides in place."""
    env = _from_gymnax(environment) if isinstance(environment, str) else environment
    if not hasattr(env, "step_env"):
        raise ConfigError(
            f"environment={environment!r} is neither the name of a gymnax environment, such as 'CartPole-v1', nor an "
            "object with its interface (reset_env, step_env, is_truncated, ...)"
        )
    return env, _override(env.default_params, params, env.name)


def _from_gymnax(name: str):
    import gymnax  # takes seconds, so not before it is needed

    if name not in gymnax.registered_envs:
        raise ConfigError(f"unknown environment {name!r}: {nearest(name, gymnax.registered_envs)}")
    return gymnax.make(name)[0]


def _override(env_params, changes: Mapping[str, float], name: str):
    known = list(vars(env_params))
    for field in changes:
        if field not in known:
            raise ConfigError(f"environment {name!r} has no parameter {field!r}: {nearest(field, known)}")
    # Integers stay integers, whatever a command line made of them.
    return env_params.replace(**{k: type(getattr(env_params, k))(v) for k, v in changes.items()})


def _strong(leaf) -> jax.Array:
    """The leaf without a weak type, which would trigger a second compile."""
    leaf = jnp.asarray(leaf)
    return jax.lax.convert_element_type(leaf, leaf.dtype)

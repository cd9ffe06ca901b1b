"""A warning about custom environments that terminate at their time limit instead of being truncated there."""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.environments.gymnax_adapter import LIMIT, env_name, gymnax_actions, overridden_params, some_action

_NUM_EPISODES = 16


def warn_of_termination_at_limit(env: Any, overrides: Mapping[str, Any]) -> None:
    """Warns, once in a process, if `terminated` of `step_env` depends on the time limit.

    It does in the template of gymnax before 1.0. Nothing is then bootstrapped from the value at the limit, which the
    episode need not have reached by itself. Environments whose episodes are never longer are not meant: the first steps
    of episodes are made under a limit of one step, and again under a longer limit.

    Args:
      env, overrides: see `from_gymnax`.
    """
    defaults = overridden_params(env, overrides)
    action_space, to_gymnax = gymnax_actions(env.action_space(defaults), env_name(env))

    def terminated(limit, key):
        _, state = env.reset_env(key, defaults)
        params = dataclasses.replace(defaults, **{LIMIT: limit})
        return jnp.asarray(env.step_env(key, state, to_gymnax(some_action(action_space)), params)[3], bool)

    try:
        # Tracing suffices to see that the result is the same for every limit; otherwise `vmap` raises an error.
        jax.eval_shape(jax.vmap(terminated, (0, None), out_axes=None), jnp.arange(2), jax.random.key(0))
        return
    except Exception:
        pass  # it depends on the limit, or needs it as a Python value
    longer = getattr(defaults, LIMIT) + 1

    def only_at_limit(key):
        return terminated(1, key) & ~terminated(longer, key)

    try:
        with jax.ensure_compile_time_eval():
            keys = jax.random.split(jax.random.key(0), _NUM_EPISODES)
            at_limit = bool(jax.jit(lambda keys: jax.vmap(only_at_limit)(keys).any())(keys))
    except Exception:  # the environment cannot have a limit of one step
        return
    if at_limit:
        warnings.warn(
            f"step_env of {env_name(env)!r} terminates at the time limit, as in gymnax before 1.0, so no value is "
            f"bootstrapped there; leave 'time >= params.{LIMIT}' out of its terminated (is_truncated tells the limit), "
            "or, if the limit is part of the task, write 'limit_terminates = True' in its class",
            stacklevel=2,
        )

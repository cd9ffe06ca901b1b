"""How custom environments end at their time limit: by truncation, and not before."""

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from grpo_jax.environments.codec import some_action
from grpo_jax.environments.environment import Environment
from grpo_jax.environments.interface import overridden_params, stepped
from grpo_jax.environments.parameters import LIMIT

_NUM_EPISODES = 16


def checked_limit(env: Any, made: Environment, overrides: dict[str, Any]) -> Environment:
    """The environment that was made of an object, with `truncates_early` where that holds.

    Warns, once in a process, if `terminated` of `step_env` depends on the time limit, as in the template of gymnax
    before 1.0. Nothing is then bootstrapped from the value at the limit, which the episode need not have reached by
    itself. Environments whose episodes are never longer are not meant: the first steps of episodes are made under a
    limit of one step, and again under a longer limit.
    """
    defaults = overridden_params(env, overrides)

    def limited(limit, params):
        return dataclasses.replace(defaults, **{LIMIT: limit}, **params)

    def terminated(limit, key):
        _, state = env.reset_env(key, defaults)
        action = made.codec.decode(some_action(made.action_space))
        return jnp.asarray(stepped(env, key, state, action, limited(limit, {}))[3], bool)

    if not made.limit_terminates and _terminates_at_limit(terminated, made.max_steps + 1):
        warnings.warn(
            f"step_env of {made.name!r} terminates at the time limit, as in gymnax before 1.0, so no value is "
            f"bootstrapped there; leave 'time >= params.{LIMIT}' out of its terminated (is_truncated tells the limit), "
            "or, if the limit is part of the task, write 'limit_terminates = True' in its class",
            stacklevel=3,
        )

    def truncations(key, actions, params):
        params, flags = limited(3, params), []
        _, state = env.reset_env(key, params)
        for action in actions:
            _, state, *_, truncated, _ = stepped(env, key, state, made.codec.decode(action), params)
            flags.append(truncated)
        return flags

    return made._replace(
        truncates_early=_truncates_early(truncations, [some_action(made.action_space)] * 3, made.params)
    )


def _terminates_at_limit(terminated, longer: int) -> bool:
    try:
        # Tracing suffices to see that the result is the same for every limit; otherwise `vmap` raises an error.
        jax.eval_shape(jax.vmap(terminated, (0, None), out_axes=None), jnp.arange(2), jax.random.key(0))
        return False
    except Exception:
        pass  # it depends on the limit, or needs it as a Python value

    def only_at_limit(key):
        return terminated(1, key) & ~terminated(longer, key)

    try:
        with jax.ensure_compile_time_eval():
            keys = jax.random.split(jax.random.key(0), _NUM_EPISODES)
            return bool(jax.jit(lambda keys: jax.vmap(only_at_limit)(keys).any())(keys))
    except Exception:  # the environment cannot have a limit of one step
        return False


def _truncates_early(truncations, actions, params) -> bool:
    """Whether episodes may be truncated before the limit: true unless it is the number of steps alone that decides.

    `truncations(key, actions, params)` are the flags of three steps under a limit of three. What is left of their
    program without all that they do not depend on then has no argument, and gives false, false, true.
    """
    try:
        program = jax.make_jaxpr(truncations)(jax.random.key(0), actions, params)
        needed, used = partial_eval.dce_jaxpr(program.jaxpr, [True] * len(actions))
        if any(used):
            return True
        with jax.ensure_compile_time_eval():
            return [bool(flag) for flag in jax.core.eval_jaxpr(needed, program.consts)] != [False, False, True]
    except Exception:  # the environment cannot have a limit of three steps
        return True

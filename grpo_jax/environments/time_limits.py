"""Whether custom environments truncate episodes before their time limit."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from grpo_jax.environments.environment import Environment
from grpo_jax.environments.parameters import LIMIT
from grpo_jax.environments.spaces import some_action


def checked_limit(made: Environment, whole: Any, defaults: Any) -> Environment:
    """The environment made of an `opened` object and default parameters, with `truncates_early` where that holds.

    It holds unless the number of steps alone decides (the flags of three steps under a limit of three do not depend on
    key, actions and parameters), or nothing is ever truncated.
    """

    def cuts(limit, key, actions, params):
        """Whether each of the first steps truncates under a limit."""
        params = dataclasses.replace(defaults, **{LIMIT: limit}, **params)
        _, state = whole.reset(key, params)
        found = []
        for action in actions:
            _, state, *_, cut, _ = whole.step(key, state, made.codec.decode(action), params)
            found.append(jnp.asarray(cut, bool))
        return found

    def cut(state, key, action, params):
        """Whether a step from any state truncates."""
        params = dataclasses.replace(defaults, **params)
        return [jnp.asarray(whole.step(key, state, made.codec.decode(action), params)[4], bool)]

    key, action = jax.random.key(0), some_action(made.action_space)
    if _constants(lambda *x: cuts(3, *x), key, [action] * 3, made.params) == [False, False, True]:
        return made
    state = jax.eval_shape(lambda key: whole.reset(key, defaults)[1], key)
    return made._replace(truncates_early=_constants(cut, state, key, action, made.params) != [False])


def _constants(flags: Callable, *arguments: Any) -> list[bool] | None:
    """The flags that a function gives, if they depend on no argument; else None.

    Without all that the flags do not need, their program then has no argument. Of a function that cannot be traced,
    such as of an environment that cannot have a limit of three steps, nothing is known.
    """
    try:
        program = jax.make_jaxpr(flags)(*arguments)
        needed, used = partial_eval.dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars))
        if any(used):
            return None
        with jax.ensure_compile_time_eval():
            return [bool(flag) for flag in jax.core.eval_jaxpr(needed, program.consts)]
    except Exception:
        return None

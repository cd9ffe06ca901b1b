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

    It holds unless the number of steps alone decides (the flags of two steps under limits of two and of three do not
    depend on key, actions and parameters), or nothing is ever truncated.
    """

    def step(state, key, action, params):
        """The next state, and whether the step truncates."""
        params = dataclasses.replace(defaults, **params)
        _, state, *_, cut, _ = whole.step(key, state, made.codec.decode(action), params)
        return state, jnp.asarray(cut, bool)

    def first_two(limit, key, action, params):
        """Whether each of the first two steps truncates under a limit."""
        params = {**params, LIMIT: limit}
        _, state = whole.reset(key, dataclasses.replace(defaults, **params))
        state, first = step(state, key, action, params)
        return [first, step(state, key, action, params)[1]]

    given = jax.random.key(0), some_action(made.action_space), made.params
    if _constants(lambda *x: first_two(2, *x) + first_two(3, *x), *given) == [False, True, False, False]:
        return made
    state = jax.eval_shape(lambda key: whole.reset(key, defaults)[1], given[0])
    return made._replace(truncates_early=_constants(lambda *x: [step(*x)[1]], state, *given) != [False])


def _constants(flags: Callable, *arguments: Any) -> list[bool] | None:
    """The flags that a function gives, if they depend on no argument; else None.

    Without all that the flags do not need, their program then has no argument. Of a function that cannot be traced,
    such as of an environment that cannot have a limit of two steps, nothing is known.
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

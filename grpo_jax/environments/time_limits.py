"""How custom environments end at their time limit: by truncation, and not before."""

import dataclasses
import warnings
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

    Warns, once in a process, if `terminated` depends on the time limit, as in gymnax before 1.0: nothing is then
    bootstrapped at the limit. Environments whose episodes are never longer are not meant.
    """
    action = some_action(made.action_space)

    def flags(limit, key, actions, params):
        """Whether each of the first steps terminates and truncates under a limit."""
        params = dataclasses.replace(defaults, **{LIMIT: limit}, **params)
        _, state = whole.reset(key, params)
        ended, cut = [], []
        for action in actions:
            _, state, _, *ends, _ = whole.step(key, state, made.codec.decode(action), params)
            ended.append(jnp.asarray(ends[0], bool))
            cut.append(jnp.asarray(ends[1], bool))
        return ended, cut

    def cut(state, key, action, params):
        """Whether a step from any state truncates."""
        params = dataclasses.replace(defaults, **params)
        return [jnp.asarray(whole.step(key, state, made.codec.decode(action), params)[4], bool)]

    may_warn = not (made.limit_terminates or made.on_host)  # the trial would call the host
    if may_warn and _terminates_at_limit(lambda *x: flags(*x, [action], {})[0][0], made.max_steps + 1):
        warnings.warn(
            f"step_env of {made.name!r} terminates at the time limit, as in gymnax before 1.0, so no value is "
            f"bootstrapped there; leave 'time >= params.{LIMIT}' out of its terminated (is_truncated tells the limit), "
            "or, if the limit is part of the task, write 'limit_terminates = True' in its class",
            stacklevel=3,
        )
    key = jax.random.key(0)
    if _traced(lambda *x: flags(3, *x)[1], key, [action] * 3, made.params)[1] == [False, False, True]:
        return made
    state = jax.eval_shape(lambda key: whole.reset(key, defaults)[1], key)
    return made._replace(truncates_early=_traced(cut, state, key, action, made.params)[1] != [False])


def _terminates_at_limit(terminated: Callable, longer: int) -> bool:
    """Whether an episode that a limit of one step ends would go on under a longer one: `terminated(limit, key)`."""
    key = jax.random.key(0)
    if not _traced(lambda *arguments: [terminated(*arguments)], 1, key)[0][0]:
        return False
    try:  # it depends on the limit, or needs it as a Python value
        with jax.ensure_compile_time_eval():
            return bool(jax.jit(lambda key: terminated(1, key) & ~terminated(longer, key))(key))
    except Exception:  # the environment cannot have a limit of one step
        return False


def _traced(flags: Callable, *arguments: Any) -> tuple[list[bool], list[bool] | None]:
    """Which arguments the flags that a function gives depend on, and the flags if on none.

    Without all that the flags do not need, their program then has no argument. Of a function that cannot be traced,
    such as of an environment that cannot have a limit of three steps, nothing is known.
    """
    try:
        program = jax.make_jaxpr(flags)(*arguments)
        needed, used = partial_eval.dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars))
        if any(used):
            return used, None
        with jax.ensure_compile_time_eval():
            return used, [bool(flag) for flag in jax.core.eval_jaxpr(needed, program.consts)]
    except Exception:
        return [True], None

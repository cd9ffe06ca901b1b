"""How custom environments end at their time limit: by truncation, and not before."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from grpo_jax.environments.codec import some_action
from grpo_jax.environments.environment import Environment
from grpo_jax.environments.interface import overridden_params, stepped
from grpo_jax.environments.parameters import LIMIT


def checked_limit(env: Any, made: Environment, overrides: Mapping[str, Any]) -> Environment:
    """The environment that was made of an object, with `truncates_early` where that holds.

    Warns, once in a process, if `terminated` depends on the time limit, as in gymnax before 1.0: nothing is then
    bootstrapped at the limit. Environments whose episodes are never longer are not meant.
    """
    defaults, action = overridden_params(env, overrides), some_action(made.action_space)

    def flags(limit, key, actions, params):
        """Whether each of the first steps terminates and truncates under a limit."""
        params = dataclasses.replace(defaults, **{LIMIT: limit}, **params)
        _, state = env.reset_env(key, params)
        ended, cut = [], []
        for action in actions:
            _, state, _, *ends, _ = stepped(env, key, state, made.codec.decode(action), params)
            ended.append(jnp.asarray(ends[0], bool))
            cut.append(jnp.asarray(ends[1], bool))
        return ended, cut

    if not made.limit_terminates and _terminates_at_limit(lambda *x: flags(*x, [action], {})[0][0], made.max_steps + 1):
        warnings.warn(
            f"step_env of {made.name!r} terminates at the time limit, as in gymnax before 1.0, so no value is "
            f"bootstrapped there; leave 'time >= params.{LIMIT}' out of its terminated (is_truncated tells the limit), "
            "or, if the limit is part of the task, write 'limit_terminates = True' in its class",
            stacklevel=3,
        )
    early = _truncates_early(lambda *x: flags(3, *x)[1], jax.random.key(0), [action] * 3, made.params)
    return made._replace(truncates_early=early)


def _terminates_at_limit(terminated: Callable, longer: int) -> bool:
    """Whether an episode that a limit of one step ends would go on under a longer one: `terminated(limit, key)`."""
    key = jax.random.key(0)
    try:
        # Tracing suffices to see that the result is the same for every limit; otherwise `vmap` raises an error.
        jax.eval_shape(jax.vmap(terminated, (0, None), out_axes=None), jnp.arange(2), key)
        return False
    except Exception:
        pass  # it depends on the limit, or needs it as a Python value
    try:
        with jax.ensure_compile_time_eval():
            return bool(jax.jit(lambda key: terminated(1, key) & ~terminated(longer, key))(key))
    except Exception:  # the environment cannot have a limit of one step
        return False


def _truncates_early(truncated: Callable, *arguments: Any) -> bool:
    """Whether episodes may be truncated before the limit: true unless it is the number of steps alone that decides.

    `truncated` of the key, actions and parameters gives the flags of three steps under a limit of three. Without all
    that they do not depend on, its program then has no argument, and gives false, false, true.
    """
    try:
        program = jax.make_jaxpr(truncated)(*arguments)
        needed, used = partial_eval.dce_jaxpr(program.jaxpr, [True] * 3)
        if any(used):
            return True
        with jax.ensure_compile_time_eval():
            return [bool(flag) for flag in jax.core.eval_jaxpr(needed, program.consts)] != [False, False, True]
    except Exception:  # the environment cannot have a limit of three steps
        return True

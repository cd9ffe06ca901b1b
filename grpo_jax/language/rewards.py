"""Rewards of completions: Python functions of many texts at once, called on the host."""

import asyncio
import contextlib
import copy
import inspect
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.environments.tokens.rewards import overlong_punishment
from grpo_jax.errors import ConfigError
from grpo_jax.host_calls import run_async
from grpo_jax.importing import import_object
from grpo_jax.language.prompts import RESERVED
from grpo_jax.language.reward_values import EXAMPLE, Payments, RewardError, checked_values, shown


class Reward(NamedTuple):
    """One part of the reward, which is the weighted sum of its parts."""

    name: str  # also names the environment's traced parameter with the weight
    # (prompts, completions, **fields) -> for each completion a number, None if the reward does not apply to it, or a
    # list of (position, number); may be async
    function: Callable
    weight: float = 1.0


def load_reward(path: str) -> Reward:
    """The reward "package.module:function", or "package.module:function=0.5" with a weight; else a ConfigError."""
    place, weight = read_weight(path)
    function = import_object(place, "reward")
    if not callable(function):
        raise ConfigError(f"reward {place!r} is not a function; write {EXAMPLE}")
    return Reward(place.partition(":")[2], function, weight)


def read_weight(path: str) -> tuple[str, float]:
    """What stands before "=", and the weight after it, by default 1; else a ConfigError."""
    place, _, weight = path.partition("=")
    try:
        number = float(weight or 1.0)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"reward {path!r}: the weight {weight!r} is not a number; write {place}=0.5")
    return place, number


def overlong(completion_ids: Sequence[list], max_completion: Sequence[int], buffer: float | None = None) -> list[float]:
    """DAPO's overlong punishment: falls from 0 to -1 over the last `buffer` tokens before the limit.

    The formula and its paper are in `tokens.rewards.overlong_punishment`. On the command line:
    `--reward my_rewards:reward --reward grpo_jax.language:overlong=0.5`.

    Args:
      completion_ids: the tokens of each completion, up to its end.
      max_completion: the limit, in tokens, the same for all.
      buffer: width of the ramp, in tokens; None: a fifth of the limit, as in the paper.

    Raises:
      ConfigError: the buffer is negative.
    """
    if buffer is not None and not buffer >= 0:
        raise ConfigError(f"overlong has buffer={buffer}, the width of a ramp in tokens; use 0 or more, or None")
    width = max_completion[0] / 5 if buffer is None else buffer
    lengths = np.array([len(ids) for ids in completion_ids])
    return overlong_punishment(lengths, max_length=max_completion[0], buffer=width).tolist()


def check_rewards(rewards: Sequence[Reward], fields: Sequence[str], source: str) -> None:
    """Checks rewards before any is called.

    Args:
      rewards: one or more.
      fields: the fields of the prompts.
      source: where the prompts come from, for the error.

    Raises:
      ConfigError: there is no reward, two have one name, or one needs an argument that the prompts have no field for.
    """
    if not rewards:
        raise ConfigError(
            f"there is no reward to learn from; name a function, such as --reward my_rewards:reward: {EXAMPLE}"
        )
    names = [reward.name for reward in rewards]
    if len(set(names)) < len(names) or "held_out" in names:
        raise ConfigError(f"rewards must differ in their names and from 'held_out', but they are {', '.join(names)}")
    known = {*RESERVED, *fields}
    for reward in rewards:
        for parameter in _parameters(reward):
            variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if parameter.default is parameter.empty and not variadic and parameter.name not in known:
                raise ConfigError(
                    f"the reward {reward.name!r} needs {parameter.name!r}, but {source} has only the fields "
                    f"{', '.join(fields) or '(none)'}; add it to every line, or give the argument a default"
                )


def sums(payments: list[list[Payments | None]]) -> np.ndarray:
    """The value of each reward for each completion, float32 `[N, K]`; 0 for one that does not apply."""
    return np.array([[sum(value for _, value in paid or ()) for paid in each] for each in payments], np.float32).T


def call_rewards(rewards: Sequence[Reward], arguments: Mapping[str, Sequence]) -> list[list[Payments | None]]:
    """What each of the `K` rewards pays for each of `N` completions, None where it does not apply.

    A function gets copies of the arguments that it names. Those that are async run at the same time, in the event loop
    of the process (`run_async`). Each is called once, also if it raises an error.

    Args:
      rewards: one or more.
      arguments: `[N]` each: `prompts` and `completions`, texts or lists of messages as the prompts are,
        `completion_ids`, their tokens, `max_completion`, their limit, and the fields of the prompts.

    Raises:
      RewardError: a function raised an error, or returned anything but N finite numbers, Nones, or lists of numbers
        with their positions; or no reward applies to a completion.
    """
    arguments = {name: list(values) for name, values in arguments.items()}
    results: list[Any] = []
    with contextlib.ExitStack() as unfinished:
        for reward in rewards:
            with _errors_of(reward):
                results.append(_listed(reward.function(**_arguments(reward, arguments))))
            if inspect.iscoroutine(results[-1]):
                unfinished.callback(results[-1].close)
        _await_all(rewards, results, unfinished)
    completions = arguments["completions"]
    pairs = zip(rewards, results, strict=True)
    payments = [checked_values(reward.name, values, completions) for reward, values in pairs]
    for paid, completion in zip(zip(*payments, strict=True), completions, strict=True):
        if all(each is None for each in paid):
            names = ", ".join(reward.name for reward in rewards)
            raise RewardError(
                f"no reward applies to the completion {shown(completion)}, as {names} returned None for it; let "
                "one of them return a number, such as 0"
            )
    return payments


def _parameters(reward: Reward) -> Sequence[inspect.Parameter]:
    """The arguments of a reward's function."""
    try:
        return tuple(inspect.signature(reward.function).parameters.values())
    except ValueError as error:
        raise ConfigError(
            f"the reward {reward.name!r} is {reward.function!r}, whose arguments are unknown; write {EXAMPLE}"
        ) from error


def _arguments(reward: Reward, arguments: Mapping[str, Sequence]) -> dict[str, list]:
    """The arguments that a reward's function names, copied, so that it may change them."""
    parameters = _parameters(reward)
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        arguments = {name: arguments[name] for name in arguments if name in {each.name for each in parameters}}
    return copy.deepcopy(arguments)


def _listed(values: Any) -> Any:
    """The values of a generator, whose function runs only now, as a list."""
    return list(values) if isinstance(values, Iterator) else values


def _await_all(rewards: Sequence[Reward], results: list[Any], unfinished: contextlib.ExitStack) -> None:
    """Replaces the results that are awaitable by what they give; they are awaited together."""

    async def finish(index: int) -> None:
        with _errors_of(rewards[index]):
            results[index] = _listed(await results[index])

    async def together() -> None:
        unfinished.pop_all()  # from here on the event loop closes them
        tasks = [asyncio.ensure_future(finish(index)) for index in waiting]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    waiting = [index for index, result in enumerate(results) if inspect.isawaitable(result)]
    if waiting:
        run_async(together())


@contextlib.contextmanager
def _errors_of(reward: Reward) -> Iterator[None]:
    """Makes a RewardError of what a reward raises, be it an exit of the program."""
    try:
        yield
    except (Exception, SystemExit) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise RewardError(
            f"the reward {reward.name!r} raised {type(error).__name__}: {error} ({place.filename}, line "
            f"{place.lineno}); let it return a number for every completion, such as 0 for one that it cannot judge"
        ) from error

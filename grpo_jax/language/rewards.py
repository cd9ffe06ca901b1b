"""Rewards of completions: Python functions of many texts at once, called on the host."""

import asyncio
import inspect
import math
import numbers
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.errors import ConfigError
from grpo_jax.importing import import_object

EXAMPLE = "def reward(prompts, completions, **fields): return [0.0 for completion in completions]"


class Reward(NamedTuple):
    """One part of the reward, which is the weighted sum of its parts."""

    name: str  # also names the environment's traced parameter with the weight
    function: Callable  # (prompts, completions, **fields) -> a number for each completion; may be async
    weight: float = 1.0


class RewardError(ConfigError):
    """A reward function failed: which one, at which completion, and what to do."""


def load_reward(path: str) -> Reward:
    """The reward "package.module:function", or "package.module:function=0.5" with a weight.

    Raises:
      ConfigError: there is no such function, or the weight is not a number.
    """
    place, _, weight = path.partition("=")
    function = import_object(place, "reward")
    if not callable(function):
        raise ConfigError(f"reward {place!r} is not a function; write {EXAMPLE}")
    try:
        return Reward(place.partition(":")[2], function, float(weight or 1.0))
    except ValueError as error:
        raise ConfigError(f"reward {path!r}: the weight {weight!r} is not a number; write {place}=0.5") from error


def check_rewards(rewards: Sequence[Reward], fields: Sequence[str], source: str) -> None:
    """Checks rewards before any is called.

    Args:
      rewards: one or more.
      fields: the fields of the prompts.
      source: where the prompts come from, for the error.

    Raises:
      ConfigError: there is no reward, two have one name, or one needs an argument that is no field of the prompts.
    """
    if not rewards:
        raise ConfigError(
            f"there is no reward to learn from; name a function, such as --reward my_rewards:reward: {EXAMPLE}"
        )
    names = [reward.name for reward in rewards]
    if len(set(names)) < len(names) or "held_out" in names:
        raise ConfigError(f"rewards must differ in their names and from 'held_out', but they are {', '.join(names)}")
    known = {"prompts", "completions", "completion_ids", *fields}
    for reward in rewards:
        for parameter in inspect.signature(reward.function).parameters.values():
            needed = parameter.default is parameter.empty and parameter.kind not in (
                parameter.VAR_KEYWORD,
                parameter.VAR_POSITIONAL,
            )
            if needed and parameter.name not in known:
                raise ConfigError(
                    f"the reward {reward.name!r} needs {parameter.name!r}, but {source} has only the fields "
                    f"{', '.join(fields) or '(none)'}; add it to every line, or give the argument a default"
                )


def score(
    rewards: Sequence[Reward],
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    fields: Mapping[str, Sequence],
) -> np.ndarray:
    """The value of each reward for each completion: float32 `[N, K]`.

    A function gets lists of length N by the names of its arguments: `prompts` and `completions` as the prompts have
    them (texts, or lists of messages), `completion_ids` (tokens), and the fields of the prompts. Those that are async
    run at the same time.

    Raises:
      RewardError: a function raised an error, or returned anything but N finite numbers.
    """
    arguments = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **fields}
    arguments = {name: list(values) for name, values in arguments.items()}
    calls = [_call(reward, arguments) for reward in rewards]
    return np.stack(
        [_checked(reward, values, completions) for reward, values in zip(rewards, _gather(calls), strict=True)], 1
    )


def _call(reward: Reward, arguments: dict[str, list]) -> Any:
    """The values of a reward, or of an async one an awaitable."""
    parameters = inspect.signature(reward.function).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        arguments = {name: arguments[name] for name in arguments if name in {each.name for each in parameters}}

    async def awaited(values):
        try:
            return await values
        except Exception as error:
            raise _raised(reward, arguments, error) from error

    try:
        values = reward.function(**arguments)
    except Exception as error:
        raise _raised(reward, arguments, error) from error
    return awaited(values) if inspect.isawaitable(values) else values


def _gather(calls: list) -> list:
    """The values of all calls; those that are awaitable are awaited together."""
    waiting = [index for index, call in enumerate(calls) if inspect.isawaitable(call)]

    async def together():
        return await asyncio.gather(*(calls[index] for index in waiting))

    for index, values in zip(waiting, asyncio.run(together()) if waiting else (), strict=True):
        calls[index] = values
    return calls


def _raised(reward: Reward, arguments: dict[str, list], error: Exception) -> RewardError:
    place = traceback.extract_tb(error.__traceback__)[-1]
    first = _first_that_raises(reward, arguments)
    completion = (
        f"the completion {_shown(first)}" if first is not None else f"{len(next(iter(arguments.values())))} completions"
    )
    return RewardError(
        f"the reward {reward.name!r} raised {type(error).__name__}: {error} ({place.filename}, line {place.lineno}), "
        f"for {completion}; let it return a number for every completion, such as 0 for one that it cannot judge"
    )


def _first_that_raises(reward: Reward, arguments: dict[str, list]) -> Any:
    """The first completion for which the function alone raises an error; None if there is none, or it is async."""
    if inspect.iscoroutinefunction(reward.function) or "completions" not in arguments:
        return None
    for index, completion in enumerate(arguments["completions"]):
        try:
            values = reward.function(**{name: [values[index]] for name, values in arguments.items()})
            if inspect.iscoroutine(values):
                values.close()
                return None
        except Exception:
            return completion
    return None


def _checked(reward: Reward, values: Any, completions: Sequence[Any]) -> np.ndarray:
    """The values as an array `[N]`."""
    try:
        values = list(values)
    except TypeError:
        raise RewardError(
            f"the reward {reward.name!r} returned {values!r}; return a list with one number for each of the "
            f"{len(completions)} completions: {EXAMPLE}"
        ) from None
    if len(values) != len(completions):
        raise RewardError(
            f"the reward {reward.name!r} returned {len(values)} values for {len(completions)} completions; return one "
            "number for each, in their order"
        )
    for value, completion in zip(values, completions, strict=True):
        is_number = isinstance(value, numbers.Real | np.bool_) or getattr(value, "shape", None) == ()
        if value is None or not is_number or not math.isfinite(value):
            raise RewardError(
                f"the reward {reward.name!r} returned {value!r} for the completion {_shown(completion)}; return a "
                "finite number for every completion, such as 0 for one that it cannot judge"
            )
    return np.array([float(value) for value in values], np.float32)


def _shown(completion: Any) -> str:
    """The text of a completion, at most 200 characters."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    return repr(text if len(text) <= 200 else text[:200] + "...")

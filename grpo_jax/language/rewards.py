"""Rewards of completions: Python functions of many texts at once, called on the host; what they return is checked."""

import asyncio
import contextlib
import copy
import inspect
import math
import operator
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, ValuesView
from decimal import Decimal
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.environments.tokens import overlong_punishment
from grpo_jax.errors import ConfigError, nearest
from grpo_jax.host_calls import run_async
from grpo_jax.importing import import_object
from grpo_jax.language.folder import as_config_error
from grpo_jax.language.prompts import RESERVED

EXAMPLE = "def reward(prompts, completions, **fields): return [0.0 for completion in completions]"
LARGEST = 1e15  # the most that a reward may be: float32 holds its square, of which a deviation is made
ADVICE = "let it return a number for every completion, such as 0 for one that it cannot judge"
OF_TRL = {
    "trainer_state": "ask for iteration, how many were made before, in place of trainer_state.global_step",
    "log_extra": "leave it out: completions.jsonl has each reward by its name",
    "log_metric": "leave it out, and return the metric as a reward of weight 0: --reward my_rewards:metric=0",
}
"""What to write in place of further arguments of TRL's rewards."""

Payments = list[tuple[int | None, float]]
"""The rewards of a completion: up to which character, None for the whole, and the value."""


class RewardError(ConfigError):
    """A reward function, or one that answers, failed: which one, at which completion or line, and what to do."""


class Reward(NamedTuple):
    """One part of the reward, which is the weighted sum of its parts."""

    name: str  # also names the environment's traced parameter with the weight
    # (prompts, completions, **fields) -> for each completion a number, None if the reward does not apply to it, or a
    # list of (position, number), one for each step; may be async
    function: Callable
    weight: float = 1.0


def load_reward(path: str) -> Reward:
    """The reward "package.module:function", or "package.module:function=0.5" with a weight; else a ConfigError."""
    place, _, weight = path.partition("=")
    try:
        number = float(weight or 1.0)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"reward {path!r}: the weight {weight!r} is not a number; write {place}=0.5")
    function = import_object(place, "reward")
    if not callable(function):
        raise ConfigError(f"reward {place!r} is not a function; write {EXAMPLE}")
    return Reward(place.partition(":")[2], function, number)


def overlong(completion_ids: Sequence[list], max_completion: Sequence[int], buffer: float | None = None) -> list[float]:
    """DAPO's overlong punishment: falls from 0 to -1 over the last `buffer` tokens before the limit.

    The formula and its paper are in `tokens.overlong_punishment`. On the command line:
    `--reward my_rewards:reward --reward grpo_jax.language:overlong=0.5`.

    Args:
      completion_ids: the tokens of each completion, up to its end.
      max_completion: the limit, in tokens, the same for all.
      buffer: width of the ramp, in tokens; None: a fifth of the limit, as in the paper.
    """
    if buffer is not None and not buffer >= 0:
        raise ConfigError(f"overlong has buffer={buffer}, the width of a ramp in tokens; use 0 or more, or None")
    width = max_completion[0] / 5 if buffer is None else buffer
    lengths = np.array([len(ids) for ids in completion_ids])
    return overlong_punishment(lengths, max_length=max_completion[0], buffer=width).tolist()


def check_rewards(rewards: Sequence[Reward], fields: Sequence[str], source: str) -> None:
    """Raises ConfigError without a reward, for two of one name, and for an argument that the prompts have no field for.

    Args:
      rewards: to check before any is called.
      fields: the fields of the prompts.
      source: where the prompts come from, for the error.
    """
    if not rewards:
        raise ConfigError(f"there is no reward to learn from; name one, such as --reward my_rewards:reward: {EXAMPLE}")
    names = [reward.name for reward in rewards]
    taken = "prompt", "prompt_tokens", "answers", "iteration"  # parameters of the environment
    if len({*names, *taken}) < len(names) + len(taken):
        given = ", ".join(names)
        raise ConfigError(f"rewards must differ in their names, and from {', '.join(taken)}, but they are {given}")
    for reward in rewards:
        for name, parameter in _parameters(reward).items():
            variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if parameter.default is parameter.empty and not variadic and name not in {*RESERVED, *fields}:
                has = f"{source} has only the fields {', '.join(fields) or '(none)'}"
                advice = OF_TRL.get(name, f"{nearest(name, [*RESERVED, *fields])} Or add it there, or give a default")
                raise ConfigError(f"the reward {reward.name!r} needs {name!r}, but {has}: {advice}")


def call_rewards(rewards: Sequence[Reward], arguments: Mapping[str, Sequence]) -> list[list[Payments | None]]:
    """What each of the `K` rewards pays for each of `N` completions, None where it does not apply.

    A function gets copies of the arguments that it names, and is called once. Those that are async run at the same
    time, in the event loop of the process (`run_async`). An error in one becomes a RewardError.

    Args:
      rewards: one or more.
      arguments: `[N]` each: `prompts` and `completions`, texts or lists of messages as the prompts are,
        `completion_ids`, their tokens, `max_completion`, `iteration`, and the fields of the prompts.
    """
    arguments = {name: list(values) for name, values in arguments.items()}
    texts, results = [text_of(completion) for completion in arguments["completions"]], []
    errors = [(f"the reward {reward.name!r}", texts, ADVICE) for reward in rewards]
    for reward, error in zip(rewards, errors, strict=True):
        with errors_of(*error):
            results.append(_listed(reward.function(**_arguments(reward, arguments))))
    results = awaited(results, errors)
    payments = [_checked(reward.name, values, texts) for reward, values in zip(rewards, results, strict=True)]
    for row in np.flatnonzero(~totals(payments)[1].any(axis=1)):
        names = ", ".join(reward.name for reward in rewards)
        none = f"no reward applies to the completion {texts[row]!r:.200}, as {names} returned None for it"
        raise RewardError(f"{none}; let one of them return a number, such as 0")
    return payments


def totals(payments: list[list[Payments | None]]) -> tuple[np.ndarray, np.ndarray]:
    """The value of each reward for each completion, float32 `[N, K]`, 0 if it does not apply, and whether it does."""
    values = [[sum(value for _, value in paid or ()) for paid in each] for each in payments]
    return np.array(values, np.float32).T, np.array([[paid is not None for paid in each] for each in payments]).T


def text_of(completion: Any) -> Any:
    """The text of a completion: of a chat that of its last message; any other value is returned unchanged."""
    is_chat = isinstance(completion, list) and completion and isinstance(completion[-1], dict)
    return completion[-1].get("content") if is_chat else completion


def _parameters(reward: Reward) -> Mapping[str, inspect.Parameter]:
    """The arguments of a reward's function."""
    with as_config_error(f"the arguments of the reward {reward.name!r} are unknown: %s; write {EXAMPLE}"):
        return inspect.signature(reward.function).parameters


def _arguments(reward: Reward, arguments: Mapping[str, Sequence]) -> dict[str, list]:
    """The arguments that a reward's function names, copied, so that it may change them."""
    parameters = _parameters(reward)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return copy.deepcopy({name: values for name, values in arguments.items() if takes_all or name in parameters})


def _listed(values: Any) -> Any:
    """The values of a generator, whose function runs only now, as a list."""
    return list(values) if isinstance(values, Iterator) else values


def awaited(results: list, errors: Sequence[tuple]) -> list:
    """The results, those that are awaitable awaited together; `errors` are the arguments of `errors_of` for each."""

    async def finish(result: Any, error: tuple) -> Any:
        with errors_of(*error):
            return _listed(await result) if inspect.isawaitable(result) else result

    async def finish_all() -> list:
        tasks = [asyncio.ensure_future(finish(*each)) for each in zip(results, errors, strict=True)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    return run_async(finish_all()) if any(map(inspect.isawaitable, results)) else results


@contextlib.contextmanager
def errors_of(what: str, texts: list, advice: str) -> Iterator[None]:
    """Makes a RewardError, with the line and the innermost variable that held a completion, of what one raises."""
    try:
        yield
    except (Exception, SystemExit) as error:
        place, frames = traceback.extract_tb(error.__traceback__)[-1], list(traceback.walk_tb(error.__traceback__))[1:]
        held = [each for frame, _ in frames[::-1] for each in frame.f_locals.items() if isinstance(each[1], str)]
        at = next((f", where {name} = {text!r:.200}" for name, text in held if text and text in texts), "")
        raise RewardError(
            f"{what} raised {type(error).__name__}: {error} ({place.filename}, line {place.lineno}{at}); {advice}"
        ) from error


def _checked(name: str, values: Any, texts: list) -> list[Payments | None]:
    """What the reward function of that name paid for each completion; RewardError for anything but a reward of each."""
    found = _as_list(values)
    if found is None or len(found) != len(texts):
        wrong = f"{values!r:.200}" if found is None else f"{len(found)} values"
        raise RewardError(
            f"the reward {name!r} returned {wrong}; return a list with one number for each of the {len(texts)} "
            f"completions, in their order: {EXAMPLE}"
        )
    payments = [None if value is None else _payments(value) for value in found]
    for paid, value, text in zip(payments, found, texts, strict=True):
        if not all(math.isfinite(number) and (end is None or 0 < end <= len(text)) for end, number in paid or ()):
            raise RewardError(
                f"the reward {name!r} returned {value!r:.200} for the completion {text!r:.200}; return a number up to "
                f"{LARGEST} for every completion, None where it does not apply, or a list of (position, number), one "
                f"for each step: its position is the number of characters up to its end, from 1 to {len(text)}"
            )
    return payments


def _as_list(values: Any) -> list | None:
    """The values of a list or an array `[N]`; None for anything else: rewards are not the items of a set or a text."""
    is_text = isinstance(values, str | bytes | bytearray | memoryview)
    if is_text or not (isinstance(values, Sequence | ValuesView) or getattr(values, "ndim", 0) == 1):
        return None
    index = getattr(values, "index", None)  # a series of pandas may have another order than the completions
    return list(values) if index is None or callable(index) or list(index) == list(range(len(values))) else None


def _payments(value: Any) -> Payments:
    """A number for the whole, or pairs (position, number); a NaN for anything else."""
    if not isinstance(value, list | tuple):
        return [(None, _number(value))]
    try:
        return [(operator.index(end), _number(number)) for end, number in value]
    except (TypeError, ValueError):
        return [(None, math.nan)]


def _number(value: Any) -> float:
    """The number, or that in an array without axes; NaN for anything else, or beyond `LARGEST`."""
    is_number = isinstance(value, Real | Decimal) or getattr(value, "shape", None) == ()
    is_other = getattr(getattr(value, "dtype", None), "kind", "f") in "cmMSU" or value is np.ma.masked
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if is_number and not is_other and abs(number := float(value)) <= LARGEST:
            return number
    return math.nan

"""What a reward function returns: checked, and as payments."""

import math
import operator
from collections.abc import Sequence, ValuesView
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np

from grpo_jax.errors import ConfigError

EXAMPLE = "def reward(prompts, completions, **fields): return [0.0 for completion in completions]"

NO_NUMBERS = str, bytes, np.timedelta64, np.datetime64
"""Scalars of NumPy among them are numbers to Python."""

Payments = list[tuple[int | None, float]]
"""The rewards of a completion: up to which character, None for the whole, and the value."""


class RewardError(ConfigError):
    """A reward function failed: which one, at which completion, and what to do."""


def checked_values(name: str, values: Any, completions: Sequence[Any]) -> list[Payments | None]:
    """What the reward function of that name paid for each completion, None where it does not apply.

    Raises:
      RewardError: the values are no list with one reward for each completion. A dict, a set, a text and an array of
        several axes can be iterated over as well, but what that gives are no rewards.
    """
    if (problem := _no_list(values)) is not None:
        raise RewardError(
            f"the reward {name!r} returned {problem}; return a list with one number for each of the "
            f"{len(completions)} completions: {EXAMPLE}"
        )
    values = list(values)
    if len(values) != len(completions):
        raise RewardError(
            f"the reward {name!r} returned {len(values)} values for {len(completions)} completions; return one "
            "number for each, in their order"
        )
    payments: list[Payments | None] = []
    for value, completion in zip(values, completions, strict=True):
        if value is None:
            payments.append(None)
            continue
        paid = _steps(value) if isinstance(value, list | tuple) else [(None, _number(value))]
        payments.append(paid)
        length = len(text_of(completion))
        for end, number in paid:
            if not math.isfinite(number):
                raise RewardError(
                    f"the reward {name!r} returned {value!r:.200} for the completion {shown(completion)}; "
                    "return a finite number for every completion, None where it does not apply, or a list of "
                    "(position, number), one for each step"
                )
            if end is not None and not 0 < end <= length:
                raise RewardError(
                    f"the reward {name!r} returned the position {end} for the completion {shown(completion)}; "
                    f"it is the number of characters up to the end of a step, from 1 to {length}"
                )
    return payments


def _no_list(values: Any) -> str | None:
    """What the values are, if they are neither a sequence, nor an array of one axis, nor None."""
    shape = getattr(values, "shape", None)
    if isinstance(shape, tuple) and shape:
        if len(shape) > 1:
            return f"an array of shape {shape}"
        index = getattr(values, "index", None)  # a series of pandas may have another order than the completions
        in_order = index is None or callable(index) or list(index) == list(range(shape[0]))
        return None if in_order else f"a series with the index {list(index)!r:.200}"
    is_list = isinstance(values, Sequence | ValuesView) and not isinstance(values, str | bytes | bytearray | memoryview)
    return None if is_list else f"{values!r:.200}"


def _steps(pairs: Sequence[Any]) -> Payments:
    """Pairs (position, number); a NaN for anything else."""
    try:
        return [(operator.index(end), _number(value)) for end, value in pairs]
    except (TypeError, ValueError):
        return [(None, math.nan)]


def _number(value: Any) -> float:
    """The number, or that in an array without axes; NaN for anything else, or beyond the range of float32."""
    is_number = isinstance(value, Real | Decimal) or getattr(value, "shape", None) == ()
    if not is_number or isinstance(value, NO_NUMBERS) or value is np.ma.masked or np.iscomplexobj(value):
        return math.nan
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return number if abs(number) <= float(np.finfo(np.float32).max) else math.nan


def text_of(completion: Any) -> Any:
    """The text of a completion: of a chat that of its last message; any other value is returned unchanged."""
    is_chat = isinstance(completion, list) and completion and isinstance(completion[-1], dict)
    return completion[-1].get("content") if is_chat else completion


def shown(completion: Any) -> str:
    """The text of a completion, at most 200 characters."""
    text = text_of(completion)
    return repr(text if len(text) <= 200 else text[:200] + "...")

"""Masks of legal actions: the method `action_masks()` of sb3-contrib, or the entry "action_mask" of the info."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from grpo_jax.errors import ConfigError

METHOD, ENTRY = "action_masks", "action_mask"


def has_masks(instance: Any, info: Any) -> bool:
    """Whether an instance of gymnasium's interface, and the info of its reset, tell which actions are legal."""
    return _method(instance) is not None or (isinstance(info, Mapping) and ENTRY in info)


def read_mask(instance: Any, info: Any, num_actions: int, ended: bool) -> np.ndarray:
    """The legal actions of the state in which the instance is, bool `[num_actions]`.

    Raises:
      ConfigError: it is missing or something else, or no action is legal although the episode has not ended.
    """
    if method := _method(instance):
        mask, what = method(), f"{METHOD}()"
    elif isinstance(info, Mapping) and ENTRY in info:
        mask, what = info[ENTRY], f'info["{ENTRY}"]'
    else:
        raise ConfigError(f'the info of a step has no "{ENTRY}", but that of the reset has; give both one')
    array = np.asarray(mask)
    if array.shape != (num_actions,) or array.dtype.kind not in "biuf":
        raise ConfigError(f"{what} is {array.dtype}{list(array.shape)}; give [{num_actions}], True for legal actions")
    if not (array.any() or ended):
        raise ConfigError(f"{what} has no legal action, but the episode goes on; terminate it there")
    return array.astype(bool)


def _method(instance: Any) -> Any:
    try:  # a wrapper of gymnasium passes attributes on only in this way
        return getattr(instance, "get_wrapper_attr", instance.__getattribute__)(METHOD)
    except AttributeError:
        return None

"""Tasks of Jumanji: games, packing and routing."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.environments.parameters import Timed, TimedState
from grpo_jax.environments.spaces import Discrete
from grpo_jax.errors import ConfigError

LIMITS = {"BinPack-v2": 20, "FlatPack-v0": 25, "Game2048-v1": 2000, "GraphColoring-v1": 20, "Minesweeper-v0": 90}
LIMITS |= {"Sudoku-v0": 81, "Sudoku-very-easy-v0": 81}
LIMITS |= {"CVRP-v1": 40, "Knapsack-v1": 50, "MultiCVRP-v0": 41, "TSP-v1": 20}
"""Time limits of tasks that Jumanji gives none: the longest episode, or 2000 where there is no longest."""

MAX_EXPONENT = 17
"""The largest tile of Game2048 is 2^17."""

MAX_ACTIONS, MAX_CATEGORIES = 10_000, 32
"""The most combinations that become one action, and the most values of an integer that becomes one-hot."""


class Jumanji(Timed):
    """A Jumanji task for one reward, such as "jumanji:Snake-v1", with Jumanji's time limit.

    Actions of several discrete parts are one discrete action, all combinations of them in row-major order, so that any
    action mask fits. An observation has the fields of Jumanji's but the mask, as a dict, or one array if there is one
    field. Integers with at most 32 values are one-hot, int8; others are divided by their largest value, float32.
    """

    def __init__(self, name: str):
        import jumanji
        from jumanji import specs

        self.name, inner = f"jumanji:{name}", jumanji.make(name)
        if inner.reward_spec.shape:
            raise ConfigError(
                f"{self.name!r} rewards {inner.reward_spec.shape[0]} agents separately, but an environment has one "
                "reward; choose a task with a single reward"
            )
        super().__init__(inner, getattr(inner, "time_limit", LIMITS.get(name)))
        self._sizes = _sizes(inner)
        if math.prod(self._sizes) > MAX_ACTIONS:
            raise ConfigError(
                f"{self.name!r} has an action mask for {len(self._sizes)} choices at once, {math.prod(self._sizes):,} "
                f"combinations, but only Discrete actions can have a mask; choose a task with at most {MAX_ACTIONS:,}"
            )
        self._spec = inner.observation_spec
        if name == "Game2048-v1":  # whose specification has no bounds
            shape = self._spec.board.shape
            self._spec = self._spec.replace(board=specs.BoundedArray(shape, jnp.int32, 0, MAX_EXPONENT))
        if hasattr(inner, "time_limit"):
            # Jumanji's own time limit terminates, so it is moved out of reach.
            inner.time_limit = np.iinfo(np.int32).max
        if hasattr(self._spec, "action_mask"):
            self.action_mask = lambda state, params: state.inner[1]

    def action_space(self, params):
        """One action for each combination of Jumanji's."""
        return Discrete(math.prod(self._sizes))

    def reset_env(self, key, params):
        inner, timestep = self.inner.reset(key)
        return _encoded(timestep.observation, self._spec), TimedState((inner, self._legal(timestep)), 0)

    def step_env(self, key, state, action, params):
        """As in gymnax. The key replaces the state's, so that members of a group can differ."""
        inner, _ = state.inner
        inner = dataclasses.replace(inner, key=key) if hasattr(inner, "key") else inner
        if self.inner.action_spec.shape:
            action = jnp.stack(jnp.unravel_index(action, self._sizes)).astype(self.inner.action_spec.dtype)
        inner, timestep = self.inner.step(inner, action)
        state = TimedState((inner, self._legal(timestep)), state.time + 1)
        return _encoded(timestep.observation, self._spec), state, timestep.reward, timestep.last(), {}

    def _legal(self, timestep):
        """The mask of all combinations, bool `[num_actions]`, or None if the task has none."""
        mask = getattr(timestep.observation, "action_mask", None)
        if mask is None:
            return None
        if mask.shape != self._sizes:  # a mask for each part: `[parts, choices]`
            mask = functools.reduce(jnp.logical_and.outer, mask)
        mask = mask.reshape(-1)
        # Where every action is illegal, as for a trapped snake, all of them end the episode.
        return mask | ~mask.any()


def _sizes(env: Any) -> tuple[int, ...]:
    """The number of choices of each part of an action."""
    spec, mask = env.action_spec, getattr(env.observation_spec, "action_mask", None)
    sizes = tuple((np.broadcast_to(spec.maximum, spec.shape or 1).reshape(-1) + 1).tolist())
    if mask is None or mask.shape == sizes:
        return sizes
    parts, choices = mask.shape  # the bound that MultiCVRP states is too large by 1
    return (choices,) * parts


def _encoded(value: Any, spec: Any) -> Any:
    """The observation, or a part of it, as a dict of arrays without the mask."""
    if not hasattr(spec, "shape"):
        fields = [name for name in spec._specs if name != "action_mask"]
        encoded = {name: _encoded(getattr(value, name), getattr(spec, name)) for name in fields}
        return encoded if len(fields) > 1 else encoded[fields[0]]
    value = jnp.asarray(value)
    if not jnp.issubdtype(spec.dtype, jnp.integer):
        return value
    if not hasattr(spec, "minimum"):
        return value.astype(jnp.float32)
    lowest, highest = int(np.asarray(spec.minimum).min()), int(np.asarray(spec.maximum).max())
    if highest - lowest >= MAX_CATEGORIES:
        return value.astype(jnp.float32) / highest
    categories = jax.nn.one_hot(value - lowest, highest - lowest + 1, dtype=jnp.int8)
    return categories if value.ndim > 1 else categories.reshape(-1)

"""Grid worlds: Navix and XLand-MiniGrid, which are MiniGrid in JAX, and Craftax, a game of survival and crafting."""

import dataclasses
import inspect
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.environments.parameters import Timed, TimedState, TimeLimit
from grpo_jax.environments.spaces import Discrete
from grpo_jax.errors import ConfigError

SIZES = 11, 6, 4
"""Numbers of the kinds of entities, of colors, and of states (of a door) or directions (of the player)."""


def one_hot_layers(cells: jax.Array, sizes: Sequence[int]) -> jax.Array:
    """Cells `[..., L]` of L integers each as int8 `[..., sum(sizes)]`: a one-hot vector for each integer, side by side.

    A dense layer or a convolution on them equals one on the sum of learnt embeddings of the L integers. An integer
    outside its range becomes zeros.
    """
    layers = [jax.nn.one_hot(cells[..., i], size, dtype=jnp.int8) for i, size in enumerate(sizes)]
    return jnp.concatenate(layers, axis=-1)


class Navix(Timed):
    """A Navix task, such as "navix:Navix-DoorKey-5x5-v0", with Navix's own time limit.

    The observation is the whole grid, `symbolic` in Navix: three integers for each cell, each one-hot, `[H, W, 21]`.
    """

    def __init__(self, name: str):
        import navix

        # Navix 0.7 limits every task to 100 steps by default; later versions have a limit for each.
        limit = {"max_steps": None} if "max_steps" in inspect.signature(navix.make).parameters else {}
        inner = navix.make(name, **limit)
        super().__init__(inner, inner.max_steps)
        self.name, self._timestep = f"navix:{name}", navix.environments.environment.Timestep

    def action_space(self, params):
        return Discrete(len(self.inner.action_set))

    def reset_env(self, key, params):
        timestep = self.inner.reset(key)
        # Every state has a copy of the pictures of its background, which only drawings need.
        return self._encoded(timestep), TimedState(timestep.state.replace(cache=None), 0)

    def step_env(self, key, state, action, params):
        """As in gymnax. The key replaces the state's, so that members of a group can differ."""
        inner = state.inner.replace(key=key)
        before = self._timestep(t=state.time, state=inner, observation=None, action=None, reward=None, step_type=None)
        after = self.inner._step(before, action)  # `step` would reset
        state = TimedState(after.state, state.time + 1)
        return self._encoded(after), state, after.reward, after.is_termination(), {}

    def render(self, state, params):
        """Navix's own picture of a state, `[H, W, 3]` uint8."""
        from navix import observations
        from navix.rendering.cache import RenderingCache

        inner = state.inner.replace(cache=RenderingCache.init(state.inner.grid))
        return np.asarray(observations.rgb(inner))

    def _encoded(self, timestep):
        return one_hot_layers(timestep.observation, SIZES)


class XLand:
    """A port of MiniGrid in XLand-MiniGrid, such as "xland:MiniGrid-DoorKey-5x5", with its own time limit.

    The observation is what the agent sees, a tile and a color for each cell, each one-hot: `[V, V, 25]`.
    """

    def __init__(self, name: str):
        import xminigrid
        from xminigrid.core.constants import NUM_COLORS, NUM_TILES
        from xminigrid.types import TimeStep

        if name.startswith("XLand"):
            raise ConfigError(f"'xland:{name}' has no goal of its own; write 'xland:MiniGrid-DoorKey-5x5', say")
        self.name, self._timestep = f"xland:{name}", TimeStep
        self.inner, self._params = xminigrid.make(name)
        self.default_params, self._sizes = TimeLimit(self._params.max_steps), (NUM_TILES, NUM_COLORS)

    def action_space(self, params):
        return Discrete(self.inner.num_actions(self._params))

    def reset_env(self, key, params):
        timestep = self.inner.reset(self._params, key)
        return one_hot_layers(timestep.observation, self._sizes), timestep.state

    def step_env(self, key, state, action, params):
        """As in gymnax; the dynamics are deterministic. Reaching the goal at step t pays `1 - 0.9 t / limit`."""
        before = self._timestep(state=state, step_type=None, reward=None, discount=None, observation=None)
        settings = dataclasses.replace(self._params, max_steps=params.max_steps_in_episode)
        after = self.inner.step(settings, before, action)
        observation = one_hot_layers(after.observation, self._sizes)
        return observation, after.state, after.reward, after.discount == 0, {}

    def is_truncated(self, state, params):
        return state.step_num >= params.max_steps_in_episode

    def render(self, state, params):
        """XLand-MiniGrid's own picture of a state, `[H, W, 3]` uint8."""
        state = jax.tree.map(jnp.asarray, state)
        timestep = self._timestep(state=state, step_type=None, reward=None, discount=None, observation=None)
        return np.asarray(self.inner.render(self._params, timestep), np.uint8)


class Craftax:
    """A Craftax game, such as "craftax:Craftax-Classic-Symbolic-v1". The time limit truncates, death terminates."""

    def __init__(self, name: str):
        from craftax.craftax_env import make_craftax_env_from_name

        self.name = f"craftax:{name}"
        inner = make_craftax_env_from_name(name, auto_reset=False)
        self.reset_env, self.step_env, self.action_space = inner.reset_env, inner.step_env, inner.action_space
        params = inner.default_params
        limited = [("max_steps_in_episode", int, params.max_timesteps)]
        limited = dataclasses.make_dataclass("CraftaxParams", limited, bases=(type(params),), frozen=True)
        # Craftax's own time limit terminates, so it is moved out of reach.
        self.default_params = limited(max_timesteps=np.iinfo(np.int32).max)

    def is_truncated(self, state, params):
        return state.timestep >= params.max_steps_in_episode

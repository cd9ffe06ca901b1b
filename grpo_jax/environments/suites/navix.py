"""Tasks of Navix: MiniGrid in JAX."""

import inspect

import numpy as np

from grpo_jax.environments.spaces import Discrete
from grpo_jax.environments.suites.encoding import one_hot_layers
from grpo_jax.environments.suites.naming import check_known
from grpo_jax.environments.suites.timed import Timed, TimedState

SIZES = 11, 6, 4
"""Numbers of the kinds of entities, of colors, and of states (of a door) or directions (of the player)."""


class Navix(Timed):
    """A Navix task, such as "navix:Navix-DoorKey-5x5-v0", with Navix's own time limit.

    The observation is the whole grid, `symbolic` in Navix: three integers for each cell, each one-hot, `[H, W, 21]`.
    """

    def __init__(self, name: str):
        import navix

        check_known("navix", name, navix.registry())
        # Navix 0.7 limits every task to 100 steps unless told otherwise; later versions have limits of their own.
        limit = {"max_steps": None} if "max_steps" in inspect.signature(navix.make).parameters else {}
        inner = navix.make(name, **limit)
        super().__init__(inner, inner.max_steps)
        self.name, self._timestep = f"navix:{name}", navix.environments.environment.Timestep

    @staticmethod
    def names() -> list[str]:
        """All names in Navix's registry."""
        import navix

        return list(navix.registry())

    def action_space(self, params):
        """As in gymnax."""
        return Discrete(len(self.inner.action_set))

    def reset_env(self, key, params):
        """As in gymnax."""
        timestep = self.inner.reset(key)
        # Every state has a copy of the pictures of its background, which only drawings need.
        return self._encoded(timestep), TimedState(timestep.state.replace(cache=None), 0)

    def step_env(self, key, state, action, params):
        """As in gymnax. The key replaces that of the state, so that members of a group can differ."""
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

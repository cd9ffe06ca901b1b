"""Craftax, a game of survival and crafting, and Craftax-Classic, a reimplementation of Crafter."""

import dataclasses

import numpy as np

from grpo_jax.environments.suites.naming import check_known


class Craftax:
    """A Craftax game, such as "craftax:Craftax-Classic-Symbolic-v1". The time limit truncates, death terminates."""

    NAMES = tuple(f"Craftax-{kind}-v1" for kind in ("Symbolic", "Pixels", "Classic-Symbolic", "Classic-Pixels"))

    def __init__(self, name: str):
        from craftax.craftax_env import make_craftax_env_from_name

        check_known("craftax", name, self.NAMES)
        self.name = f"craftax:{name}"
        inner = make_craftax_env_from_name(name, auto_reset=False)
        self.reset_env, self.step_env, self.action_space = inner.reset_env, inner.step_env, inner.action_space
        params = inner.default_params
        limited = [("max_steps_in_episode", int, params.max_timesteps)]
        limited = dataclasses.make_dataclass("CraftaxParams", limited, bases=(type(params),), frozen=True)
        # Craftax's own time limit terminates, so it is moved out of reach.
        self.default_params = limited(max_timesteps=np.iinfo(np.int32).max)

    @staticmethod
    def names() -> list[str]:
        """Classic and full, symbolic and pixels."""
        return list(Craftax.NAMES)

    def is_truncated(self, state, params):
        """As in gymnax."""
        return state.timestep >= params.max_steps_in_episode

"""Environments on the host that are registered with gymnasium."""

import functools

from grpo_jax.environments.host import HostEnvironment
from grpo_jax.environments.suites.common import check_known
from grpo_jax.errors import ConfigError


class Gymnasium(HostEnvironment):
    """An environment of gymnasium, such as "gymnasium:CartPole-v1", or "gymnasium:ale_py:ALE/Pong-v5" of a package."""

    def __init__(self, name: str):
        import gymnasium

        if ":" not in name:
            check_known("gymnasium", name, gymnasium.registry)
        # gymnasium's own wrapper for the time limit would truncate before a longer max_steps_in_episode.
        make = functools.partial(gymnasium.make, name, max_episode_steps=-1, disable_env_checker=True)
        try:
            super().__init__(make, name=f"gymnasium:{name}", max_steps=gymnasium.spec(name).max_episode_steps)
        except gymnasium.error.Error as error:
            raise ConfigError(f"gymnasium cannot make {name!r}: {error}") from error

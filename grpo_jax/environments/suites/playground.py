"""Tasks of MuJoCo Playground: DeepMind's control suite, legged robots and manipulation, on MJX."""

import subprocess
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.environments.suites.naming import check_known
from grpo_jax.environments.suites.rigid_bodies import RigidBodies
from grpo_jax.environments.suites.timed import TimedState
from grpo_jax.errors import ConfigError


class Playground(RigidBodies):
    """A task such as "playground:CartpoleBalance".

    The time limit and the number of times that an action is repeated are those of the task's own configuration; the
    rewards of repeated actions are summed, as in Playground's own training. Physics run in MJX's implementation in JAX,
    on every device.
    """

    def __init__(self, name: str):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from mujoco_playground import registry

            check_known("playground", name, registry.ALL_ENVS)
            config = registry.get_default_config(name)
            try:
                inner = registry.load(name, config_overrides={"impl": "jax"} if "impl" in config else None)
            except (OSError, subprocess.CalledProcessError) as error:
                raise ConfigError(
                    f"'playground:{name}' needs the robots of mujoco_menagerie, which could not be cloned from GitHub "
                    f"({error}); clone github.com/google-deepmind/mujoco_menagerie into external_deps of the package "
                    "mujoco_playground, or use a task of the control suite, such as 'playground:CartpoleBalance'"
                ) from error
        self.num_repeats = config.action_repeat
        super().__init__(inner, -(-config.episode_length // self.num_repeats))
        self.name = f"playground:{name}"

    @staticmethod
    def names() -> list[str]:
        """The control suite, and the robots and hands that need mujoco_menagerie."""
        from mujoco_playground import registry

        return sorted(registry.ALL_ENVS)

    @property
    def dt(self) -> float:
        """As in `RigidBodies`."""
        return self.inner.dt * self.num_repeats

    @property
    def mj_model(self) -> Any:
        """As in `RigidBodies`."""
        return self.inner.mj_model

    def joints(self, state: TimedState) -> tuple[jax.Array, jax.Array]:
        """As in `RigidBodies`."""
        return state.inner.data.qpos, state.inner.data.qvel

    def step_env(self, key, state, action, params):
        """As in gymnax; Playground's dynamics are deterministic."""

        def repeat(inner, _):
            inner = self.inner.step(inner, action)
            return inner, inner.reward

        inner, rewards = jax.lax.scan(repeat, state.inner, length=self.num_repeats)
        return inner.obs, TimedState(inner, state.time + 1), jnp.sum(rewards), inner.done, {}

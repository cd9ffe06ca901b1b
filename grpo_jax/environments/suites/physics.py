"""Rigid bodies: tasks of brax and of MuJoCo Playground (DeepMind's control suite, legged robots, hands) on MJX."""

import subprocess
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.environments.spaces import Box
from grpo_jax.environments.suites.common import Timed, TimedState, check_known
from grpo_jax.errors import ConfigError


class RigidBodies(Timed):
    """Base class of tasks with brax's interface: `inner.reset`, `inner.step`, `inner.action_size` and `inner.dt`.

    Subclasses define `step_env`; for drawings `mj_model` and `joints`.
    """

    @property
    def dt(self) -> float:
        """Seconds of a step."""
        return self.inner.dt

    @property
    def mj_model(self) -> Any:
        """The model of the task in MuJoCo."""
        raise NotImplementedError

    def joints(self, state: TimedState) -> tuple[jax.Array, jax.Array]:
        """Positions and velocities of all joints, in MuJoCo's order."""
        raise NotImplementedError

    def action_space(self, params):
        """Actions in [-1, 1], as in the packages' own training."""
        size = self.inner.action_size
        return Box((-1.0,) * size, (1.0,) * size)

    def reset_env(self, key, params):
        inner = self.inner.reset(key)
        return inner.obs, TimedState(inner, 0)


class Brax(RigidBodies):
    """A brax task, such as "brax:ant", with episodes of 1000 steps as in brax's own training."""

    def __init__(self, name: str):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # brax recommends MJX's own suites
            from brax import envs

            check_known("brax", name, envs._envs)
            if name == "swimmer":
                raise ConfigError(
                    "'brax:swimmer' cannot be stepped: brax passes arguments to jax.numpy.clip that JAX 0.10 removed; "
                    "use another task, such as 'playground:SwimmerSwimmer6'"
                )
            super().__init__(envs.get_environment(name), 1000)
        self.name = f"brax:{name}"

    @staticmethod
    def names() -> list[str]:
        """All tasks of brax; its `swimmer` cannot be stepped under JAX 0.10 and later."""
        from brax import envs

        return sorted(envs._envs)

    @property
    def mj_model(self) -> Any:
        return self.inner.sys.mj_model

    def joints(self, state: TimedState) -> tuple[jax.Array, jax.Array]:
        return state.inner.pipeline_state.q, state.inner.pipeline_state.qd

    def step_env(self, key, state, action, params):
        """As in gymnax; brax's dynamics are deterministic."""
        before = jax.tree.map(lambda leaf: leaf, state.inner)  # a copy, as brax modifies dictionaries of the state
        inner = self.inner.step(before, action)
        return inner.obs, TimedState(inner, state.time + 1), inner.reward, inner.done, {}


class Playground(RigidBodies):
    """A task such as "playground:CartpoleBalance".

    The time limit and the number of times that an action is repeated come from the task's configuration; the
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
        return self.inner.dt * self.num_repeats

    @property
    def mj_model(self) -> Any:
        return self.inner.mj_model

    def joints(self, state: TimedState) -> tuple[jax.Array, jax.Array]:
        return state.inner.data.qpos, state.inner.data.qvel

    def step_env(self, key, state, action, params):
        """As in gymnax; Playground's dynamics are deterministic."""

        def repeat(inner, _):
            inner = self.inner.step(inner, action)
            return inner, inner.reward

        inner, rewards = jax.lax.scan(repeat, state.inner, length=self.num_repeats)
        return inner.obs, TimedState(inner, state.time + 1), jnp.sum(rewards), inner.done, {}

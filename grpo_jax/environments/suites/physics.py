"""Rigid bodies: tasks of brax and of MuJoCo Playground (DeepMind's control suite, legged robots, hands) on MJX."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.environments.parameters import Timed, TimedState
from grpo_jax.environments.spaces import Box


def in_float32(function: Callable) -> Callable:
    """The function with matrix products in float32, unless `jax_default_matmul_precision` is set.

    GPUs from the A100 on round the inputs of products to TF32 by default, and physics then gives other returns
    (github.com/google-deepmind/mujoco_playground/issues/86).
    """

    @functools.wraps(function)
    def call(*arguments):
        with jax.default_matmul_precision(jax.config.jax_default_matmul_precision or "float32"):
            return function(*arguments)

    return call


class RigidBodies(Timed):
    """Base class of tasks with brax's interface: `inner.reset`, `inner.step`, `inner.action_size` and `inner.dt`.

    Subclasses define `step_env`; for drawings `mj_model`, the model of the task in MuJoCo, and `joints(state)`,
    positions and velocities of all joints in MuJoCo's order.
    """

    can_diverge = True

    @property
    def dt(self) -> float:
        """Seconds of a step."""
        return self.inner.dt

    def action_space(self, params):
        """Actions in [-1, 1], as in the packages' own training."""
        size = self.inner.action_size
        return Box((-1.0,) * size, (1.0,) * size)

    @in_float32
    def reset_env(self, key, params):
        inner = self.inner.reset(key)
        return inner.obs, TimedState(inner, 0)


class Brax(RigidBodies):
    """A brax task, such as "brax:ant", with episodes of 1000 steps as in brax's own training."""

    def __init__(self, name: str):
        from brax import envs

        super().__init__(envs.get_environment(name), 1000)
        self.name = f"brax:{name}"

    @property
    def mj_model(self) -> Any:
        return self.inner.sys.mj_model

    def joints(self, state: TimedState) -> tuple[jax.Array, jax.Array]:
        return state.inner.pipeline_state.q, state.inner.pipeline_state.qd

    @in_float32
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
        from mujoco_playground import registry

        config = registry.get_default_config(name)
        inner = registry.load(name, config_overrides={"impl": "jax"} if "impl" in config else None)
        self.num_repeats = config.action_repeat
        super().__init__(inner, -(-config.episode_length // self.num_repeats))
        self.name = f"playground:{name}"

    @property
    def dt(self) -> float:
        return self.inner.dt * self.num_repeats

    @property
    def mj_model(self) -> Any:
        return self.inner.mj_model

    def joints(self, state: TimedState) -> tuple[jax.Array, jax.Array]:
        return state.inner.data.qpos, state.inner.data.qvel

    @in_float32
    def step_env(self, key, state, action, params):
        """As in gymnax; Playground's dynamics are deterministic."""

        def repeat(inner, _):
            inner = self.inner.step(inner, action)
            return inner, inner.reward

        inner, rewards = jax.lax.scan(repeat, state.inner, length=self.num_repeats)
        return inner.obs, TimedState(inner, state.time + 1), jnp.sum(rewards), inner.done, {}

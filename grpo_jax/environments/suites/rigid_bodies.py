"""Tasks of rigid bodies, the part that brax and MuJoCo Playground share."""

from typing import Any

import jax

from grpo_jax.environments.spaces import Box
from grpo_jax.environments.suites.timed import Timed, TimedState


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
        """As in gymnax."""
        inner = self.inner.reset(key)
        return inner.obs, TimedState(inner, 0)

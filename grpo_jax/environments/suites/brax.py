"""Tasks of brax: rigid bodies that walk, reach and balance."""

import warnings
from typing import Any

import jax

from grpo_jax.environments.suites.naming import check_known
from grpo_jax.environments.suites.rigid_bodies import RigidBodies
from grpo_jax.environments.suites.timed import TimedState
from grpo_jax.errors import ConfigError


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
        """As in `RigidBodies`."""
        return self.inner.sys.mj_model

    def joints(self, state: TimedState) -> tuple[jax.Array, jax.Array]:
        """As in `RigidBodies`."""
        return state.inner.pipeline_state.q, state.inner.pipeline_state.qd

    def step_env(self, key, state, action, params):
        """As in gymnax; brax's dynamics are deterministic."""
        before = jax.tree.map(lambda leaf: leaf, state.inner)  # a copy, as brax modifies dictionaries of the state
        inner = self.inner.step(before, action)
        return inner.obs, TimedState(inner, state.time + 1), inner.reward, inner.done, {}

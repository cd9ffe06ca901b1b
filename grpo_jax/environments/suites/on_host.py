"""Environments on the host: those registered with gymnasium, and envpool's simulators in C++."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_jax.environments.host import HostEnvironment
from grpo_jax.environments.host.gymnasium_interface import Outcome
from grpo_jax.environments.suites.common import check_known
from grpo_jax.errors import ConfigError


class Gymnasium(HostEnvironment):
    """An environment of gymnasium, such as "gymnasium:CartPole-v1", or "gymnasium:ale_py:ALE/Pong-v5" of a package."""

    def __init__(self, name: str):
        import gymnasium

        if ":" not in name:
            check_known("gymnasium", name, gymnasium.registry)
        try:
            limit = gymnasium.spec(name).max_episode_steps

            def make():
                # gymnasium's own wrapper for the time limit would truncate before a longer max_steps_in_episode.
                return gymnasium.make(name, max_episode_steps=-1, disable_env_checker=True)

            super().__init__(make, name=f"gymnasium:{name}", max_steps=limit)
        except gymnasium.error.Error as error:
            raise ConfigError(f"gymnasium cannot make {name!r}: {error}") from error


MAX_RESETS = 64
"""The most simulators that are in memory only for their first observation."""


class EnvPool(HostEnvironment):
    """An environment of envpool, such as "envpool:CartPole-v1" or "envpool:Pong-v5"."""

    def __init__(self, name: str):
        import envpool

        check_known("envpool", name, envpool.list_all_envs())
        super().__init__(Pools(name), name=f"envpool:{name}")


class Pools:
    """`Simulators` in pools of envpool.

    envpool takes seeds only when it makes a pool. So the episodes that begin at the same time get a new pool,
    and are stepped in one call as long as they last. A simulator is a pool and an index in it. Channels of images come
    last, as convolutions here expect.
    """

    def __init__(self, name: str):
        self._name = name
        pool = self._make([0])
        self.observation_space, self.action_space = pool.observation_space, pool.action_space
        shape = self.observation_space.shape
        self._channels_first = shape is not None and len(shape) == 3 and shape[0] < min(shape[1:])
        if self._channels_first:
            space = self.observation_space
            low, high = (np.moveaxis(bound, 0, -1) for bound in (space.low, space.high))
            self.observation_space = type(space)(low, high, dtype=space.dtype)
        self.max_steps = pool.spec.config.max_episode_steps

    def first_observations(self, seeds: Sequence[int]) -> list[Any]:
        parts = [seeds[i : i + MAX_RESETS] for i in range(0, len(seeds), MAX_RESETS)]
        return [observation for part in parts for _, observation in self.begin(part)]

    def begin(self, seeds: Sequence[int]) -> list[tuple[Any, Any]]:
        pool = self._make(seeds)
        observations = self._rows(pool.reset()[0], len(seeds))
        return [((pool, i), observation) for i, observation in enumerate(observations)]

    def step(self, simulators: Sequence[Any], actions: Sequence[Any]) -> list[Outcome]:
        """See `Simulators`. All pools begin to step before the first is waited for."""
        rows: dict[Any, list[int]] = {}
        for row, (pool, _) in enumerate(simulators):
            rows.setdefault(pool, []).append(row)
        for pool, members in rows.items():
            indices = np.array([simulators[row][1] for row in members], np.int32)
            pool.send(np.array([actions[row] for row in members]), indices)
        outcomes = [None] * len(simulators)
        for pool, members in rows.items():
            observation, reward, terminated, truncated, info = pool.recv(reset=False, return_info=True)
            observations = self._rows(observation, len(members))
            row_of = {simulators[row][1]: row for row in members}
            for i, index in enumerate(info["env_id"].tolist()):
                outcomes[row_of[index]] = Outcome(observations[i], reward[i], terminated[i], truncated[i])
        return outcomes

    def release(self, simulator: Any) -> None:
        """See `Simulators`. A pool is freed with its last simulator."""

    def _make(self, seeds: Sequence[int]) -> Any:
        import envpool

        num_threads = min(len(seeds), os.cpu_count() or 1)
        return envpool.make_gymnasium(self._name, num_envs=len(seeds), seed=list(seeds), num_threads=num_threads)

    def _rows(self, batch: Any, num_rows: int) -> list[Any]:
        """The observation of each row of a batch."""
        if isinstance(batch, dict):
            rows = {name: self._rows(part, num_rows) for name, part in batch.items()}
            return [{name: rows[name][i] for name in rows} for i in range(num_rows)]
        return list(np.moveaxis(batch, 1, -1) if self._channels_first else batch)

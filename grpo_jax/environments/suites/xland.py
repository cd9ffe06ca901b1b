"""XLand-MiniGrid: worlds of goals and rules, and ports of MiniGrid."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.environments.parameters import TimeLimit
from grpo_jax.environments.spaces import Discrete
from grpo_jax.environments.suites.encoding import one_hot_layers
from grpo_jax.environments.suites.naming import check_known
from grpo_jax.errors import ConfigError


class XLand:
    """An environment of XLand-MiniGrid, with its own time limit.

    The observation is what the agent sees, a tile and a color for each cell, each one-hot: `[V, V, 25]`. A goal and its
    rules are not observed.

    Args:
      name: a port of MiniGrid, such as "MiniGrid-DoorKey-5x5"; or a world and a benchmark, such as
        "XLand-MiniGrid-R1-9x9/trivial-21k", of which each reset draws a ruleset.
      rulesets: instead of a benchmark's name: one ruleset, `xminigrid.types.RuleSet`, or a `Benchmark` of them.
    """

    def __init__(self, name: str, rulesets: Any = None):
        import xminigrid
        from xminigrid.core.constants import NUM_COLORS, NUM_TILES
        from xminigrid.types import TimeStep

        world, _, benchmark = name.partition("/")
        check_known("xland", world, xminigrid.registered_environments())
        if benchmark:
            rulesets = _load(benchmark)
        is_xland = world.startswith("XLand")
        if is_xland and rulesets is None:
            raise ConfigError(
                f"'xland:{name}' has no goal, but a benchmark has goals and rules; write 'xland:{world}/trivial-21k', "
                f"or another of {', '.join(xminigrid.registered_benchmarks())}"
            )
        if not is_xland and rulesets is not None:
            raise ConfigError(f"'xland:{world}' has a fixed goal, and no rulesets; write 'xland:{world}'")
        self.name, self._rulesets, self._timestep = f"xland:{name}", rulesets, TimeStep
        self.inner, self._params = xminigrid.make(world)
        self.default_params, self._sizes = TimeLimit(self._params.max_steps), (NUM_TILES, NUM_COLORS)

    @staticmethod
    def names() -> list[str]:
        """The ports of MiniGrid, and every world with each benchmark that has been downloaded."""
        import xminigrid

        known = xminigrid.registered_environments()
        downloaded = [name for name in xminigrid.registered_benchmarks() if _path(name).exists()]
        worlds = [f"{world}/{name}" for world in known if world.startswith("XLand") for name in downloaded]
        return [name for name in known if not name.startswith("XLand")] + worlds

    def action_space(self, params):
        """As in gymnax."""
        return Discrete(self.inner.num_actions(self._params))

    def reset_env(self, key, params):
        """As in gymnax."""
        settings = self._params
        if self._rulesets is not None:
            key, key_ruleset = jax.random.split(key)
            ruleset = self._rulesets
            ruleset = ruleset.sample_ruleset(key_ruleset) if hasattr(ruleset, "sample_ruleset") else ruleset
            settings = dataclasses.replace(settings, ruleset=ruleset)
        timestep = self.inner.reset(settings, key)
        return one_hot_layers(timestep.observation, self._sizes), timestep.state

    def step_env(self, key, state, action, params):
        """As in gymnax; the dynamics are deterministic. Reaching the goal at step t pays `1 - 0.9 t / limit`."""
        before = self._timestep(state=state, step_type=None, reward=None, discount=None, observation=None)
        settings = dataclasses.replace(self._params, max_steps=params.max_steps_in_episode)
        after = self.inner.step(settings, before, action)
        observation = one_hot_layers(after.observation, self._sizes)
        return observation, after.state, after.reward, after.discount == 0, {}

    def is_truncated(self, state, params):
        """As in gymnax."""
        return state.step_num >= params.max_steps_in_episode

    def render(self, state, params):
        """XLand-MiniGrid's own picture of a state, `[H, W, 3]` uint8."""
        state = jax.tree.map(jnp.asarray, state)
        timestep = self._timestep(state=state, step_type=None, reward=None, discount=None, observation=None)
        return np.asarray(self.inner.render(self._params, timestep), np.uint8)


def _path(benchmark: str) -> Path:
    """The file of a benchmark, where XLand-MiniGrid keeps it."""
    from xminigrid import benchmarks

    return Path(benchmarks.DATA_PATH) / benchmarks.NAME2HFFILENAME[benchmark]


def _load(benchmark: str) -> Any:
    """The rulesets of a benchmark that has been downloaded."""
    import xminigrid

    check_known("xland", benchmark, xminigrid.registered_benchmarks())
    if not _path(benchmark).exists():
        raise ConfigError(
            f"the benchmark {benchmark!r} has not been downloaded to {_path(benchmark)}; to download it, write "
            f"python -c \"import xminigrid; xminigrid.load_benchmark('{benchmark}')\""
        )
    return xminigrid.load_benchmark(benchmark)

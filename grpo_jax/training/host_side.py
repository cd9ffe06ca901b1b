"""What the host does before and between the halves of a train step, where the environment has a host side.

```python
play, learn = (jax.jit(jax.vmap(make(config))) for make in (make_play, make_learn))
for iteration in range(100):
    states = with_choices(config, states, keys, iteration)
    played = play(states)
    states, metrics = learn(states, played, host_outcome(config, played))
```
"""

import jax
import numpy as np

from grpo_jax.config import Config
from grpo_jax.rollouts.outcomes import outcome_shapes
from grpo_jax.training.train_step import Played
from grpo_jax.types import RewardParts, TrainState


def with_choices(config: Config, states: TrainState, keys: jax.Array, iteration: int) -> TrainState:
    """The states with what the host chooses for their next iteration: see `HostSide.choose`.

    Args:
      config: of the run.
      states: of `R` rows, each leaf `[R, ...]`.
      keys: `[R]`, with which the rows began.
      iteration: the number of iterations before.
    """
    params = states.rollout.environment_params
    chosen = config.env.host.choose(keys, iteration, config.num_groups)
    members = {name: np.repeat(value, config.group_size, axis=1) for name, value in chosen.items()}
    moved = jax.device_put(members, {name: params[name].sharding for name in chosen})
    return states.replace(rollout=states.rollout._replace(environment_params=params | moved))


def host_outcome(config: Config, played: Played, rows: np.ndarray | None = None) -> RewardParts:
    """The rewards `[R, B, ...]` of what has been played, for `learn`: see `HostSide.outcome`.

    Args:
      config: of the run.
      played: each leaf `[R, ...]`.
      rows: int `[N]`, those to reward, if others have ended; None: all.
    """
    end, num_rows = played.rollout, len(played.rollout.episode_length)
    rows = np.arange(num_rows) if rows is None else rows
    seen = jax.tree.map(lambda leaf: np.asarray(leaf)[rows], (end.environment, end.environment_params))
    shapes = outcome_shapes(config.env, num_rows, config.num_envs)
    outcome = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    for whole, part in zip(outcome, config.env.host.outcome(*seen), strict=True):
        whole[rows] = part
    return outcome

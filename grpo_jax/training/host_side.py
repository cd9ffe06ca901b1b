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
from grpo_jax.environments import chosen_parameters
from grpo_jax.rollouts.outcomes import evaluated_on_host, outcome_shapes
from grpo_jax.training.train_step import Played
from grpo_jax.types import RewardParts, TrainState


def with_choices(config: Config, states: TrainState, keys: jax.Array, iteration: int) -> TrainState:
    """The states `[R, ...]` with the parameters that the host chooses for their next iteration.

    Args:
      config: of the run.
      states: before the iteration.
      keys: `[R]`, with which the rows began.
      iteration: iterations made before.
    """
    params = states.rollout.environment_params
    chosen = chosen_parameters(config.env, params, keys, iteration, config.group_size)
    layouts = {name: params[name].sharding for name in chosen}
    rollout = states.rollout._replace(environment_params=params | jax.device_put(chosen, layouts))
    return states.replace(rollout=rollout)


def host_outcome(config: Config, played: Played, rows: np.ndarray | None = None) -> RewardParts:
    """The rewards `[R, B, ...]` of what has been played, for the second half of the train step.

    Args:
      config: of the run.
      played: each leaf `[R, ...]`.
      rows: the rows whose iteration counts, and that are rewarded, int `[N]`; None: all.
    """
    num_rows = len(played.rollout.episode_length)
    rows = np.arange(num_rows) if rows is None else rows
    found = evaluated_on_host(config.env, jax.tree.map(lambda leaf: np.asarray(leaf)[rows], played.rollout))
    shapes = outcome_shapes(config.env, num_rows, config.num_envs)
    outcome = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    for whole, part in zip(outcome, found, strict=True):
        whole[rows] = part
    return outcome

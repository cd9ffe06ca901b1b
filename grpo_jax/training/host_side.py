"""What the host does before and between the halves of a train step, where the environment has a host side.

```python
states = jax.vmap(make_init(config), in_axes=(0, None))(keys, hyperparams)
play, learn = (jax.jit(jax.vmap(make(config))) for make in (make_play, make_learn))
for iteration in range(100):
    states = with_choices(config, states, keys, iteration)
    played = played_with_host(config, play, states)
    states, metrics = learn(states, played, host_outcome(config, played))
```

`make_learn(config, steps_to_learn(played))` is a faster program where all episodes are short.
"""

from collections.abc import Callable

import jax
import numpy as np

from grpo_jax.config import Config
from grpo_jax.rollouts.outcomes import outcome_shapes
from grpo_jax.training.train_step import Played
from grpo_jax.types import PyTree, RewardParts, TrainState
from grpo_jax.updates.lengths import rounded_length


def with_choices(config: Config, states: TrainState, keys: jax.Array, iteration: int) -> TrainState:
    """The states with what the host chooses for their next iteration: see `HostSide.choose`.

    Args:
      config: of the run.
      states: of `R` rows, each leaf `[R, ...]`.
      keys: `[R]`, with which the rows began.
      iteration: the number of iterations before.
    """
    chosen = config.env.host.choose(keys, iteration, config.num_groups)
    return _with_parameters(states, {name: np.repeat(value, config.group_size, 1) for name, value in chosen.items()})


def played_with_host(config: Config, play: Callable[..., Played], states: TrainState, *given: PyTree) -> Played:
    """`play(states, *given)`, again with what the host changes, until it changes nothing: see `HostSide.again`."""

    def again(played):
        change, end = config.env.host.again, played.rollout
        return change and change(end.environment, end.environment_params)

    return played_again(lambda changed: play(_with_parameters(states, changed), *given), {}, again)


def played_again(play: Callable[[PyTree], PyTree], given: PyTree, again: Callable[[PyTree], PyTree | None]) -> PyTree:
    """`play(given)`, and again with what `again` gives for the result, until that is None."""
    while given is not None:
        result = play(given)
        given = again(result)
    return result


def _with_parameters(states: TrainState, changed: dict[str, np.ndarray]) -> TrainState:
    """The states with other parameters of the environments, each `[R, B, ...]`."""
    params = states.rollout.environment_params
    moved = jax.device_put(changed, {name: params[name].sharding for name in changed})
    return states.replace(rollout=states.rollout._replace(environment_params=params | moved))


def steps_to_learn(played: Played) -> int:
    """The steps up to the end of the longest episode of all rows, rounded up to a `rounded_length`."""
    is_valid = np.asarray(played.trajectory.valid).any(axis=(0, 2))  # of [R, T, B]: [T]
    return rounded_length(int(np.flatnonzero(is_valid).max(initial=0)) + 1, len(is_valid))


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

"""Iterations of one row within its budget, as a compiled program makes them: whole, or as a rollout and an update."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config import Config
from grpo_jax.objectives.reductions import missing
from grpo_jax.training import budget
from grpo_jax.training.checks import try_on_shapes
from grpo_jax.training.train_step import Played, make_learn, make_play, make_train_step
from grpo_jax.types import Metrics, TrainState


def budgeted_chunk(config: Config, length: int) -> Callable[[tuple], tuple[TrainState, Metrics]]:
    """`(state, budget) -> (state, metrics)`: iterations of one row, which change nothing once its budget is spent."""
    train_step = make_train_step(config)

    def chunk(row):
        state, limit = row
        # XLA unrolls a loop of one iteration and fuses it with other code, which rounds differently: none is of one.
        in_chunk = np.arange(max(length, 2)) < length

        def step(state, in_chunk):
            goes_on = budget.allows_another(limit, state)
            return jax.lax.cond(in_chunk & goes_on, train_step, lambda state: _stay(config, state), state)

        return jax.lax.scan(step, state, in_chunk)

    return chunk


def budgeted_play(config: Config) -> Callable[[tuple], Played]:
    """`(state, budget) -> played`, which is 0 once the budget is spent."""
    play = make_play(config)

    def nothing(state):
        return jax.tree.map(jnp.zeros_like, jax.eval_shape(play, state))

    return lambda row: jax.lax.cond(budget.allows_another(row[1], row[0]), play, nothing, row[0])


def budgeted_learn(config: Config, length: int) -> Callable[[tuple], tuple[TrainState, Metrics]]:
    """`(state, budget, played, outcome) -> (state, metrics)`, of a chunk of one iteration."""
    learn = make_learn(config, length)

    def learnt(row):
        state, limit, *given = row
        goes_on = budget.allows_another(limit, state)
        state, metrics = jax.lax.cond(goes_on, learn, lambda state, *_: _stay(config, state), state, *given)
        return state, jax.tree.map(lambda metric: metric[None], metrics)

    return learnt


def _stay(config: Config, state: TrainState) -> tuple[TrainState, Metrics]:
    """The state and the metrics of a row that makes no more iterations."""

    def empty(metric):
        return jnp.full_like(metric, missing() if jnp.issubdtype(metric.dtype, jnp.floating) else 0)

    return state, jax.tree.map(empty, try_on_shapes(config, state.hyperparams))

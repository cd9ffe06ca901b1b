"""Population-based training by hand: rows of the state with low returns become copies of rows with high ones.

A state is data, so selection is a gather along the rows, in a callback between iterations (Jaderberg et al.,
https://arxiv.org/abs/1711.09846). Run `python -m experiments.population`; the function `select` is the method.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import TrainState, run
from grpo_jax.commands.harness.command import command, make_console
from grpo_jax.commands.harness.limits import Count, Seed
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.commands.harness.runs import make_plan


@dataclasses.dataclass
class Arguments:
    """Trains a population on CartPole-v1 and adapts its learning rates during training."""

    population: Count = 8
    """How many train side by side."""
    rounds: Count = 10
    """Selections."""
    iterations: Count = 3
    """Train steps between two selections."""
    num_envs: Count = 32
    """Environments of each."""
    seed: Seed = 0
    """Seed of all randomness."""


def select(states: TrainState, scores: jax.Array, key: jax.Array) -> TrainState:
    """The worst quarter becomes copies of the best quarter, with 0.8 or 1.25 times the learning rate.

    Args:
      states: each leaf `[R, ...]`.
      scores: `[R]`, larger is better; NaN is worst.
      key: of the factors.

    Returns:
      The states; each row keeps its own random key, so that copies differ from then on.
    """
    num_rows = scores.shape[0]
    order = jnp.argsort(jnp.nan_to_num(scores, nan=-jnp.inf))
    worst, best = order[: num_rows // 4], order[num_rows - num_rows // 4 :]
    source = jnp.arange(num_rows).at[worst].set(best)
    factor = jnp.ones(num_rows).at[worst].set(jax.random.choice(key, jnp.array([0.8, 1.25]), worst.shape))
    chosen = jax.tree.map(lambda leaf: leaf[source], states)
    hyperparams = chosen.hyperparams.replace(learning_rate=chosen.hyperparams.learning_rate * factor)
    return chosen.replace(hyperparams=hyperparams, key=states.key)


def main(arguments: Arguments) -> None:
    num_rows = arguments.population
    key_init, key_select = jax.random.split(jax.random.key(arguments.seed))
    plan = make_plan("CartPole-v1", "grpo", jax.random.split(key_init, num_rows), total_steps=10**9)  # no rate decays
    config = dataclasses.replace(plan.config, num_envs=arguments.num_envs, num_minibatches=4)
    hyperparams = plan.hyperparams.replace(learning_rate=jnp.logspace(-5, -1, num_rows))
    console = make_console()

    def next_round(progress, chunk):
        if chunk is None:
            return None
        number = progress.iteration // arguments.iterations
        scores, rates = chunk.metrics["episode/return_mean"][-1], progress.states.hyperparams.learning_rate
        spread = f"learning rates {rates.min():.1e} to {rates.max():.1e}"
        console.print(f"round {number}: return {np.median(scores):.4g}, best {scores.max():.4g}; {spread}")
        states = jax.jit(select)(progress.states, scores, jax.random.fold_in(key_select, number))
        return progress._replace(states=states, stopped=np.full(num_rows, number == arguments.rounds))

    run(config, hyperparams, plan.keys, callback=next_round, chunk_length=arguments.iterations)


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

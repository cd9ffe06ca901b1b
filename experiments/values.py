"""How much of the returns a critic and baselines explain: `python -m experiments.values`.

PPO trains a policy, which then plays rollouts of the length of training, one after the other. Each method values the
states of the same rollouts: by the critic, by the rollout itself, or by those before it. The measure is the explained
variance: the fraction of the variance of the discounted returns from those states that the values explain.
"""

import dataclasses
import functools
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from grpo_jax import Config, Hyperparams, TrainState, make_init, make_train_step
from grpo_jax.baselines import lstd_baseline, observed, recursive_lstd_baseline
from grpo_jax.commands.harness.command import command, make_console, provenance
from grpo_jax.commands.harness.limits import Between, Count, OutFile, Seed, Seeds, Steps
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.commands.harness.settings import settings, split_fields
from grpo_jax.objectives import discounted_returns, explained_variance
from grpo_jax.recording.files import write_json
from grpo_jax.rollouts.collect import collect
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.types import Trajectory

from .minatar import GAMES

MEASURED = 4  # rollouts whose states are valued
AFTER = 600  # steps that follow them and count in their returns; a discount of 0.99 leaves 0.2% of later rewards


@dataclasses.dataclass
class Arguments:
    """Compares values of the states that a policy visits with the returns that follow."""

    games: tuple[str, ...] = GAMES
    """Names of MinAtar's games."""
    total_steps: Steps = 500_000
    """Environment steps for which PPO is trained first."""
    before: tuple[Count, ...] = (1, 5, 20)
    """Earlier rollouts of the same policy that the recursive baseline has seen, one column for each number."""
    gae_lambda: Annotated[float, Between(0.0, 1.0, "a number from 0 to 1")] = 0.8
    """Lambda of PPO's advantages and of the eligibility of least squares."""
    num_seeds: Seeds = 4
    """Number of policies, each trained with another seed."""
    seed: Seed = 0
    """Of all randomness."""
    out: OutFile | None = None
    """JSON file for the results."""


def main(arguments: Arguments) -> None:
    console = make_console(width=130)
    keys = jax.random.split(jax.random.key(arguments.seed), arguments.num_seeds)
    results = {}
    for game in arguments.games:
        with console.status(game):
            by_seed = jax.jit(functools.partial(jax.lax.map, functools.partial(measure, arguments, game)))(keys)
        results[game] = dict(zip(labels(arguments), map(np.asarray, by_seed), strict=True))
    console.print(table(results))
    if arguments.out is not None:
        write_json(arguments.out, provenance() | {"explained_variance": results})


def labels(arguments: Arguments) -> list[str]:
    return [
        "PPO's critic",
        "LSTD on the policy's features, this rollout",
        "LSTD on observations, this rollout",
        *(f"LSTD on observations, {number} earlier" for number in arguments.before),
    ]


def measure(arguments: Arguments, game: str, key: jax.Array) -> list[jax.Array]:
    """The explained variance of each method, for one policy on a game."""
    static, traced = split_fields(f"{game}-MinAtar", settings(f"{game}-MinAtar", "ppo"))
    config = Config(environment=f"{game}-MinAtar", algorithm="ppo", **static)
    hyperparams = Hyperparams(**traced | {"gae_lambda": arguments.gae_lambda})
    key_train, key_play = jax.random.split(key)
    state, _ = jax.lax.scan(
        lambda state, _: make_train_step(config)(state),
        make_init(config)(key_train, hyperparams),
        length=max(arguments.total_steps // config.steps_per_iteration, 1),
    )
    first = max(arguments.before)
    last = first + MEASURED
    rollouts = play(config, state, key_play, num_rollouts=last - (-AFTER // config.num_steps))
    flat = (-1, config.num_envs)
    rewards, ended = rollouts.reward.reshape(flat), rollouts.ended.reshape(flat)
    returns = discounted_returns(rewards, ended, discount=hyperparams.discount).reshape(rollouts.reward.shape)
    settled = {"policy": config.policy, "params": state.params, "hyperparams": hyperparams, "group_size": 1}

    def explained(values):
        everything = jnp.ones(returns[first:last].shape, bool).reshape(flat)
        return explained_variance(values.reshape(flat), returns[first:last].reshape(flat), everything)

    def by_itself(baseline):
        return explained(
            jax.lax.map(lambda one: baseline.apply(one, (), **settled)[0], part(rollouts, slice(first, last)))
        )

    def by_earlier(number):
        seen = (part(rollouts, slice(now - number, now + 1)) for now in range(first, last))
        return explained(jnp.stack([values_after(each, settled) for each in seen]))

    return [
        explained(rollouts.value[first:last]),
        by_itself(lstd_baseline()),
        by_itself(lstd_baseline(features=observed)),
        *map(by_earlier, arguments.before),
    ]


def play(config: Config, state: TrainState, key: jax.Array, num_rollouts: int) -> Trajectory:
    """Rollouts of the policy, one after the other, with their final observations: `[num_rollouts, T, N]`."""
    config = dataclasses.replace(config, algorithm=config.algorithm._replace(baseline=lstd_baseline()))
    simulator = Simulator(config.env, config.policy, state.params, state.hyperparams.discount)

    def rollout(played, key):
        return collect(config, simulator, played, *jax.random.split(key))

    return jax.lax.scan(rollout, state.rollout, jax.random.split(key, num_rollouts))[1]


def part(rollouts: Trajectory, which: slice | int) -> Trajectory:
    return jax.tree.map(lambda leaf: leaf[which], rollouts)


def values_after(rollouts: Trajectory, settled: dict[str, Any]) -> jax.Array:
    """The recursive baseline's values of the last rollout `[T, N]`, by those before it, all of the same weight."""
    settled = settled | {"hyperparams": settled["hyperparams"].replace(value_decay=1.0)}
    baseline, first = recursive_lstd_baseline(), part(rollouts, 0)
    before = baseline.init(first, settled["policy"], settled["params"])
    _, _, state = baseline.apply(first, before, **settled)

    def value(state, rollout):
        values, _, state = baseline.apply(rollout, state, **settled)
        return state, values

    return jax.lax.scan(value, state, part(rollouts, slice(1, None)))[1][-1]


def table(results: dict[str, dict[str, np.ndarray]]) -> Table:
    rendered = Table("values by", *results, title="explained variance of discounted returns, mean ± standard error")
    for label in next(iter(results.values())):
        scores = [values[label] for values in results.values()]
        errors = [f" ± {x.std(ddof=1) / len(x) ** 0.5:.3f}" if len(x) > 1 else "" for x in scores]
        rendered.add_row(label, *(f"{x.mean():.3f}{error}" for x, error in zip(scores, errors, strict=True)))
    return rendered


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

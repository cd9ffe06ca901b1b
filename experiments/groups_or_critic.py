"""When groups beat a critic: `python -m experiments.groups_or_critic`.

A critic has to predict what a start fixes, also if no observation shows it; the members of a group that starts there
share it, so that it cancels. CartPole-v1 with such a hidden number is trained for equal environment steps. Every method
has the same trials: the learning rate of each cell is the best one on seeds of its own. The score is the length of
sampled episodes, which is the return without the hidden number.
"""

import dataclasses
import functools
import math
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

from grpo_jax import Config, Hyperparams, evaluate, run
from grpo_jax.algorithms import GRPO, GRPO_RETURN_TO_GO
from grpo_jax.commands.harness.command import command, make_console
from grpo_jax.commands.harness.limits import Seed, Seeds, Steps
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.groups import ANCHORED, forked
from grpo_jax.objectives import group_normalized
from grpo_jax.policies import MLP
from grpo_jax.recording.figures import panels
from grpo_jax.sweeps.runs import score_summary
from grpo_jax.types import Trajectory

from .harness.summaries import TABLE, chosen, method_cells, read_results, write_results


def discounted_outcome(trajectory: Trajectory, hyperparams: Hyperparams, group_size: int) -> jax.Array:
    """`[T, B]`: the discounted return of each episode, normalised in its group, on all of its steps."""
    discounts = hyperparams.discount ** jnp.arange(len(trajectory.reward))[:, None]
    scores = jnp.sum(discounts * trajectory.reward, axis=0, where=trajectory.valid).reshape(-1, group_size)
    return jnp.where(trajectory.valid, group_normalized(scores).reshape(1, -1), 0.0)


LEARNING_RATES = (3e-4, 1e-3, 2.5e-3, 5e-3, 1e-2)
EPISODES = 64
SECONDS = "core-seconds of a run"

CRITIC = {"algorithm": "ppo", "num_envs": 32, "num_minibatches": 16}
SMALL = {"num_envs": 32, "group_size": 4, "num_minibatches": 16}
LARGE = {"num_envs": 128, "group_size": 16, "num_minibatches": 16}
MEMORY = {"network": MLP(hidden_sizes=(64,), recurrent="mingru"), "num_minibatches": 8}
BRANCHES = {"algorithm": GRPO_RETURN_TO_GO._replace(start=forked(32)), "num_steps": 128}
WINDOWS = {"algorithm": GRPO_RETURN_TO_GO._replace(start=ANCHORED), "num_steps": 128, "regroup_every": 32}
METHODS = {
    "PPO": CRITIC,
    "PPO, rewards normalised": CRITIC | {"normalize_rewards": True},
    "PPO, critic told": CRITIC | {"network": MLP(actor_observation=("seen",))},
    "PPO, recurrent": CRITIC | MEMORY,
    "GRPO, 16": LARGE | {"algorithm": "grpo"},
    "GRPO, 4, discounted": SMALL | {"algorithm": GRPO._replace(advantage=discounted_outcome)},
    "RLOO, 16": LARGE | {"algorithm": "rloo"},
    "forked, 4": SMALL | BRANCHES,
    "anchored, 16": LARGE | WINDOWS,
}
"""Fields of `Config`; the number is the size of the groups."""


class Task(NamedTuple):
    """Rows of the table that one program of each method trains."""

    rows: dict[str, dict[str, float]]  # parameters of `HiddenCartPole`, by the row's name
    methods: tuple[str, ...]
    observed: bool = False  # policies see what is hidden


SPREADS = {
    "scale": {"1": 0.0, "0.1 … 10": np.log(10), "0.01 … 100": np.log(100), "1e-4 … 1e4": np.log(1e4)},
    "bonus": {"±10": 10.0, "±100": 100.0, "±1000": 1000.0},
    "delay": {"1 … 10": np.log(10), "1 … 100": np.log(100), "1 … 500": np.log(500)},
    "level": {"1/1.5 … 1.5": np.log(1.5), "1/2.5 … 2.5": np.log(2.5), "1/4 … 4": np.log(4)},
}
"""The parameter of `HiddenCartPole` by the range of what the hidden number changes."""
NUMBERS = {f"{kind} {name}": {kind: spread} for kind, spreads in SPREADS.items() for name, spread in spreads.items()}
FIVE = {"num_values": 5, "scale": np.log(100), "level": np.log(2.5)}
WITHOUT_MEMORY = tuple(method for method in METHODS if method != "PPO, recurrent")
SEVERAL = ("PPO", "PPO, rewards normalised", "GRPO, 4, discounted", "forked, 4")
TASKS = (
    Task(NUMBERS, WITHOUT_MEMORY),
    # Observations have no rewards, so that a policy with memory finds out nothing but the level.
    Task({"level 1/4 … 4": NUMBERS["level 1/4 … 4"]}, ("PPO, recurrent",)),
    Task({"tasks hidden": FIVE}, (*SEVERAL, "PPO, recurrent")),
    Task({"tasks observed": FIVE}, SEVERAL, observed=True),
)
ROWS = tuple(dict.fromkeys(row for task in TASKS for row in task.rows))


@dataclasses.dataclass
class Arguments:
    """Trains PPO and critic-free groups where something is hidden that fixes a part of the return."""

    rows: tuple[str, ...] = ROWS
    """What is hidden, and how much it changes."""
    methods: tuple[str, ...] = tuple(METHODS)
    """Which methods are trained; results that are in the folder stay."""
    total_steps: Steps = 200_000
    """Environment steps a seed may take."""
    num_seeds: Seeds = 10
    """Independent runs of each cell of the table."""
    tuning_seeds: Seeds = 4
    """Other seeds, on which each cell chooses its learning rate."""
    seed: Seed = 0
    """Of all randomness."""
    out: Path = Path("runs/groups_or_critic")
    """Folder for the results; what it has is not run again."""


def main(arguments: Arguments) -> None:
    console = make_console()
    results = read_results(arguments.out, arguments)
    results.pop(SECONDS, None)
    rows, names = chosen(dict.fromkeys(ROWS), arguments.rows, "row"), chosen(METHODS, arguments.methods, "method")
    programs = [(task, method) for task in TASKS for method in names if method in task.methods]
    for task, method in track(programs, "training", console=console):
        absent = [row for row in task.rows if row in rows and method not in results.get(row, {})]
        if not absent:
            continue
        for row, entry in zip(absent, train(task, method, absent, arguments), strict=True):
            results[row] = results.get(row, {}) | {method: entry}
        results = {row: results[row] for row in ROWS if row in results}
        write_results(
            results | {SECONDS: seconds_of(results)}, arguments.out, ["hidden", *METHODS], cells_of, arguments
        )
    draw(results, arguments.out / "groups_or_critic.png")
    console.print((arguments.out / TABLE).read_text(), f"Results in {arguments.out}", soft_wrap=True)


def seconds_of(results: dict[str, dict]) -> dict[str, float]:
    """The median core-seconds that a method took to train one seed on CartPole."""
    poles = [results[row] for row in NUMBERS if row in results]
    times = {method: [row[method]["core_seconds"] for row in poles if method in row] for method in METHODS}
    return {method: float(np.median(each)) for method, each in times.items() if each}


def cells_of(name: str, entries: dict) -> list[str]:
    """A row of the table."""
    if name == SECONDS:
        return [name, *(f"{entries[method]:.2f}" if method in entries else "" for method in METHODS)]
    return method_cells(name, entries, METHODS)


def train(task: Task, method: str, rows: list[str], arguments: Arguments) -> list[dict]:
    """The scores of a method in each row, with the learning rate that was best for it."""
    from .harness.hidden import HiddenCartPole  # gymnax starts JAX's devices

    config = Config(HiddenCartPole(observed=task.observed or "told" in method), **METHODS[method])
    key_tuning, key_final = jax.random.split(jax.random.key(arguments.seed))
    num_rates, num_rows, num_seeds = len(LEARNING_RATES), len(rows), arguments.num_seeds
    batch = math.gcd(num_rates * arguments.tuning_seeds, num_seeds)
    score = functools.partial(scores, config, arguments.total_steps, batch)
    names = {name for row in rows for name in task.rows[row]}
    params = {name: np.array([task.rows[row].get(name, 0) for row in rows]) for name in names}

    rates = np.array(LEARNING_RATES)
    keys = jax.random.split(key_tuning, arguments.tuning_seeds)
    tuning = score(params, np.tile(rates, (num_rows, 1)), keys)[0].mean(axis=-1)
    best = rates[tuning.argmax(axis=1)]
    final, seconds = score(params, best[:, None], jax.random.split(key_final, num_seeds))
    return [
        score_summary(each[0]) | {"learning_rate": rate, "tuning": means, "core_seconds": seconds}
        for each, rate, means in zip(final, best, tuning, strict=True)
    ]


def scores(
    config: Config, total_steps: int, batch: int, params: dict, rates: np.ndarray, keys: jax.Array
) -> tuple[np.ndarray, float]:
    """Mean lengths of the episodes of trained policies, `[rows, rates, keys]`, and the core-seconds of training one.

    They are trained `batch` at a time, so that all is one compiled program.

    Args:
      params: of the environment by name, each `[rows]`.
      rates: `[rows, rates]`.
    """
    shape = *rates.shape, len(keys)
    row, _, seed = (index.reshape(-1) for index in np.indices(shape))
    rates = np.repeat(rates.reshape(-1), len(keys))
    length = jax.jit(jax.vmap(lambda state, key: evaluate(config, state, key, num_episodes=EPISODES).lengths.mean()))
    found, seconds = [], 0.0
    for which in np.arange(len(row)).reshape(-1, batch):
        started = time.process_time()
        numbers = {"total_steps": total_steps, "learning_rate": jnp.array(rates[which]), "final_learning_rate": 0.0}
        env_params = {name: each[row[which]] for name, each in params.items()}
        own = keys[seed[which]]
        states = run(config, Hyperparams(**numbers), own, env_params=env_params).states
        seconds += time.process_time() - started
        found.append(np.asarray(length(states, own)))
    return np.concatenate(found).reshape(shape), seconds / len(row)


def draw(results: dict[str, dict], path: Path) -> None:
    """A panel for each kind: the score of each method over what is hidden."""
    kinds: dict[str, dict] = {}
    for row, entries in results.items():
        kind, name = row.split(" ", 1)
        kinds.setdefault(kind, {})[name] = entries
    with panels(path, len(kinds), size=(3.6, 2.6), columns=3) as (figure, axes):
        for (kind, rows), axis in zip(kinds.items(), axes, strict=True):
            for index, method in enumerate(METHODS):
                shown = {at: row[method] for at, row in enumerate(rows.values()) if method in row}
                if not shown:
                    continue
                at = np.array(list(shown)) + 0.05 * (index - len(METHODS) // 2)  # side by side, to tell them apart
                low, high = np.array([each["ci95"] for each in shown.values()]).T
                style = "--" if METHODS[method]["algorithm"] == "ppo" else "-"
                line = {"color": f"C{index}", "linewidth": 1}
                axis.plot(at, [each["iqm"] for each in shown.values()], style, marker=".", label=method, **line)
                axis.vlines(at, low, high, **line)
            axis.set_xticks(range(len(rows)), rows, fontsize="x-small")
            axis.set_title(kind, fontsize="small")
            axis.set(xlim=(-0.5, len(rows) - 0.5), ylim=(0, None))
        figure.supylabel("length of episodes", fontsize="small")
        lines = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        figure.legend(lines.values(), lines, loc="outside lower center", ncols=4, fontsize="x-small")


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

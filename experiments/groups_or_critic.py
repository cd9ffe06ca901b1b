"""When groups beat a critic: `python -m experiments.groups_or_critic`.

A critic has to predict what a start fixes, also if no observation shows it; the members of a group that starts there
share it, so that it cancels. Tasks with such a hidden number or goal are trained for equal environment steps.
Every method has the same trials: the learning rate of each cell is the best one on seeds of its own.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

from grpo_jax import Algorithm, Config, Hyperparams, evaluate, run
from grpo_jax.algorithms import GIGPO, GRPO_RETURN_TO_GO
from grpo_jax.commands.harness.command import command, make_console
from grpo_jax.commands.harness.limits import Seed, Seeds, Steps
from grpo_jax.commands.harness.parsing import chosen, parse_flags
from grpo_jax.evaluation.episodes import Evaluation
from grpo_jax.groups import ANCHORED, forked
from grpo_jax.policies import MLP
from grpo_jax.recording.figures import panels
from grpo_jax.sweeps.runs import score_summary

from .claims_2511_03527 import EXACT
from .gigpo import BINS
from .harness.summaries import TABLE, method_cells, read_results, write_results

LEARNING_RATES = (3e-4, 1e-3, 2.5e-3, 5e-3, 1e-2)
EPISODES = 64
SECONDS = "core-seconds of a run"


def methods(gigpo: Algorithm, **shared) -> dict[str, dict]:
    """The fields of `Config` for each method, with those that a task gives all of them."""
    critic = {"algorithm": "ppo", "num_envs": 32, "num_minibatches": 16} | shared
    small = {"num_envs": 32, "group_size": 4, "num_minibatches": 16} | shared
    large = small | {"num_envs": 128, "group_size": 16}
    windows = {"algorithm": GRPO_RETURN_TO_GO._replace(start=ANCHORED), "num_steps": 128, "regroup_every": 32}
    branches = {"algorithm": GRPO_RETURN_TO_GO._replace(start=forked(32)), "num_steps": 128}
    memory = {"network": MLP(hidden_sizes=(64,), recurrent="mingru"), "num_minibatches": 8}
    return {
        "PPO": critic,
        "PPO, rewards normalised": critic | {"normalize_rewards": True},
        "PPO, critic told": critic | {"network": MLP(actor_observation=("seen",))},
        "PPO, recurrent": critic | memory,
        "GRPO, 16": large | {"algorithm": "grpo"},
        "GRPO, 4": small | {"algorithm": "grpo"},
        "GRPO, 4, discounted": small | {"algorithm": EXACT},
        "RLOO, 16": large | {"algorithm": "rloo"},
        "GiGPO, 4": small | {"algorithm": gigpo},
        "forked, 4": small | branches,
        "anchored, 16": large | windows,
    }


def length(evaluation: Evaluation) -> jax.Array:
    return evaluation.lengths.mean()


def percent(evaluation: Evaluation) -> jax.Array:
    return 100 * evaluation.returns.mean()


class Task(NamedTuple):
    """Rows of the table that one program of each method trains."""

    environment: str  # a class of harness/hidden.py
    rows: dict[str, dict[str, float]]  # parameters of the environment, by the row's name
    methods: dict[str, dict]
    score: Callable[[Evaluation], jax.Array] = length
    observed: bool = False  # policies see what is hidden
    numbers: dict[str, float] = {}  # hyperparameters


SPREADS = {
    "scale": {"1": 0.0, "0.1 … 10": np.log(10), "0.01 … 100": np.log(100), "1e-4 … 1e4": np.log(1e4)},
    "bonus": {"±10": 10.0, "±100": 100.0, "±1000": 1000.0},
    "delay": {"1 … 10": np.log(10), "1 … 100": np.log(100), "1 … 500": np.log(500)},
    "level": {"1/1.5 … 1.5": np.log(1.5), "1/2.5 … 2.5": np.log(2.5), "1/4 … 4": np.log(4)},
}
"""The parameter of `HiddenCartPole` by the range of what the hidden number changes."""
NUMBERS = {f"{kind} {name}": {kind: spread} for kind, spreads in SPREADS.items() for name, spread in spreads.items()}
FIVE = {"num_values": 5, "scale": np.log(100), "level": np.log(2.5)}
POLES = methods(GIGPO._replace(advantage=BINS))
ROOMS = methods(GIGPO, normalize_observations=True)
NOT_OBSERVED = ("PPO, critic told", "PPO, recurrent", "GiGPO, 4")
"""Methods that are not for policies that see everything; the last one's bins are those of the hidden task."""
OBSERVED_POLES, OBSERVED_ROOMS = (
    {method: fields for method, fields in each.items() if method not in NOT_OBSERVED} for each in (POLES, ROOMS)
)
BONUS = {"entropy_coef": 0.01}
TASKS = (
    Task("HiddenCartPole", NUMBERS | {"tasks hidden": FIVE}, POLES),
    Task("HiddenCartPole", {"tasks observed": FIVE}, OBSERVED_POLES, observed=True),
    Task("HiddenGoal", {"goal hidden": {}}, ROOMS, percent, numbers=BONUS),
    Task("HiddenGoal", {"goal observed": {}}, OBSERVED_ROOMS, percent, observed=True, numbers=BONUS),
)
REMEMBERED = ("level", "tasks", "goal")
"""What a recurrent policy can find out; observations have no rewards, so that nothing tells it of the others."""


@dataclasses.dataclass
class Arguments:
    """Trains PPO and critic-free groups where something is hidden that fixes a part of the return."""

    rows: tuple[str, ...] = tuple(row for task in TASKS for row in task.rows)
    """What is hidden, and how much it changes."""
    methods: tuple[str, ...] = tuple(POLES)
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
    results = read_results(arguments.out)
    results.pop(SECONDS, None)
    every = dict.fromkeys(row for task in TASKS for row in task.rows)
    rows, names = chosen(every, arguments.rows, "row"), chosen(POLES, arguments.methods, "method")
    programs = [(task, method) for task in TASKS for method in names if method in task.methods]
    for task, method in track(programs, "training", console=console):
        absent = [row for row in task.rows if row in rows and method not in results.get(row, {})]
        if method == "PPO, recurrent":
            absent = [row for row in absent if row.startswith(REMEMBERED)]
        if not absent:
            continue
        for row, entry in zip(absent, train(task, method, absent, arguments), strict=True):
            results[row] = results.get(row, {}) | {method: entry}
        results = {row: results[row] for row in every if row in results}
        write_results(results | {SECONDS: seconds_of(results)}, arguments.out, ["hidden", *POLES], cells_of)
    draw(results, arguments.out / "groups_or_critic.png")
    console.print((arguments.out / TABLE).read_text(), f"Results in {arguments.out}", soft_wrap=True)


def seconds_of(results: dict[str, dict]) -> dict[str, float]:
    """The median core-seconds that a method took to train one seed on CartPole."""
    poles = [results[row] for row in NUMBERS if row in results]
    times = {method: [row[method]["core_seconds"] for row in poles if method in row] for method in POLES}
    return {method: float(np.median(each)) for method, each in times.items() if each}


def cells_of(name: str, entries: dict) -> list[str]:
    """A row of the table."""
    if name == SECONDS:
        return [name, *(f"{entries[method]:.2f}" if method in entries else "" for method in POLES)]
    return method_cells(name, entries, POLES)


def train(task: Task, method: str, rows: list[str], arguments: Arguments) -> list[dict]:
    """The scores of a method in each row, with the learning rate that was best for it."""
    from .harness import hidden  # gymnax starts JAX's devices

    environment = getattr(hidden, task.environment)(observed=task.observed or "told" in method)
    config = Config(environment, **task.methods[method])
    key_tuning, key_final = jax.random.split(jax.random.key(arguments.seed))
    num_rates, num_rows, num_seeds = len(LEARNING_RATES), len(rows), arguments.num_seeds
    batch = math.gcd(num_rates * arguments.tuning_seeds, num_seeds)
    score = functools.partial(scores, config, task, arguments.total_steps, batch)
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
    config: Config, task: Task, total_steps: int, batch: int, params: dict, rates: np.ndarray, keys: jax.Array
) -> tuple[np.ndarray, float]:
    """Scores of trained policies for each row, learning rate and key, and the core-seconds that training one took.

    They are trained `batch` at a time, so that all is one compiled program.

    Args:
      params: of the environment by name, each `[rows]`.
      rates: `[rows, rates]`.
    """
    shape = *rates.shape, len(keys)
    row, _, seed = (index.reshape(-1) for index in np.indices(shape))
    rates = np.repeat(rates.reshape(-1), len(keys))
    score = jax.jit(jax.vmap(lambda state, key: task.score(evaluate(config, state, key, num_episodes=EPISODES))))
    found, seconds = [], 0.0
    for which in np.arange(len(row)).reshape(-1, batch):
        started = time.process_time()
        numbers = {"total_steps": total_steps, "learning_rate": jnp.array(rates[which]), "final_learning_rate": 0.0}
        env_params = {name: each[row[which]] for name, each in params.items()}
        own = keys[seed[which]]
        states = run(config, Hyperparams(**numbers | task.numbers), own, env_params=env_params).states
        seconds += time.process_time() - started
        found.append(np.asarray(score(states, own)))
    return np.concatenate(found).reshape(shape), seconds / len(row)


def draw(results: dict[str, dict], path: Path) -> None:
    """A panel for each kind: the score of each method over what is hidden."""
    kinds: dict[str, dict] = {}
    for row, entries in results.items():
        kind, name = row.split(" ", 1)
        kinds.setdefault(kind, {})[name] = entries
    with panels(path, len(kinds), size=(3.6, 2.6), columns=3) as (figure, axes):
        for (kind, rows), axis in zip(kinds.items(), axes, strict=True):
            for index, method in enumerate(POLES):
                shown = {at: row[method] for at, row in enumerate(rows.values()) if method in row}
                low, high = np.array([each["ci95"] for each in shown.values()]).reshape(-1, 2).T
                style = "--" if POLES[method]["algorithm"] == "ppo" else "-"
                means = [each["iqm"] for each in shown.values()]
                axis.plot(list(shown), means, style, marker=".", color=f"C{index}", label=method)
                axis.fill_between(list(shown), low, high, color=f"C{index}", alpha=0.12, linewidth=0)
            axis.set_xticks(range(len(rows)), rows, fontsize="x-small")
            axis.set_title(kind, fontsize="small")
            axis.set_ylim(bottom=0)
        figure.supylabel("score", fontsize="small")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="x-small")


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

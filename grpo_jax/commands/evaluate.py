"""Episodes of the trained policies in a folder: `grpo-jax evaluate runs/mine --num-episodes 1000`."""

import dataclasses
import time

import jax
import numpy as np
from rich.console import Console
from rich.progress import track

from grpo_jax import Config, TrainedPolicy, evaluate
from grpo_jax.commands.harness.command import command, make_console
from grpo_jax.commands.harness.figures import Cell, print_table
from grpo_jax.commands.harness.limits import Count, OutFile
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.commands.harness.trained import EpisodeArguments
from grpo_jax.devices.mesh import make_row_mesh, make_rows_function
from grpo_jax.recording.files import write_json
from grpo_jax.recording.statistics import estimate
from grpo_jax.runs.run_spec import hardware, versions
from grpo_jax.sweeps.runs import score_summary

EPISODES_AT_ONCE = 4096  # of all rows together


@dataclasses.dataclass
class Arguments(EpisodeArguments):
    """Plays whole episodes with the trained policies of all seeds of a run."""

    num_episodes: Count = 1000
    """Episodes of each seed."""
    out: OutFile | None = None
    """JSON file for the returns and lengths of all episodes."""


def main(arguments: Arguments) -> None:
    policies, console = arguments.load("all"), make_console()
    started = time.perf_counter()
    returns, lengths = play(policies, arguments, console)
    seconds = time.perf_counter() - started
    print_table(console, table(policies, returns, lengths), title=policies.name)
    kind, word = "greedy" if arguments.greedy else "sampled", policies.settings.word
    word = word.removesuffix("s") if len(policies) == 1 else word
    console.print(
        f"{policies.config.env.name}: {arguments.num_episodes} {kind} episodes of each of {len(policies)} {word}, "
        f"{lengths.sum() / seconds:,.0f} steps/s",
        soft_wrap=True,
    )
    if arguments.out is not None:
        write_json(arguments.out, summarise(arguments, policies, returns, lengths))
        console.print(f"Written to {arguments.out}", soft_wrap=True)


def play(policies: TrainedPolicy, arguments: Arguments, console: Console) -> tuple[np.ndarray, np.ndarray]:
    """Returns and lengths `[R, num_episodes]`, of batches, so that the memory is bounded."""
    num_rows, num_episodes = len(policies), arguments.num_episodes
    num_batches = -(-num_episodes // max(1, EPISODES_AT_ONCE // num_rows))
    size = -(-num_episodes // num_batches)

    def episodes(policy, key):
        return evaluate(policies.config, policy.state(key), key, num_episodes=size, greedy=arguments.greedy)

    episodes_of_rows = make_rows_function(episodes, make_row_mesh(num_rows))
    keys = jax.random.split(jax.random.key(arguments.seed), num_batches)
    shown = track(keys, "episodes", console=console, transient=True, disable=not console.is_interactive)
    batches = [episodes_of_rows(policies, jax.random.split(key, num_rows)) for key in shown]
    returns, lengths = (np.concatenate(parts, axis=1)[:, :num_episodes] for parts in zip(*batches, strict=True))
    return returns, lengths


def table(policies: TrainedPolicy, returns: np.ndarray, lengths: np.ndarray) -> list[list[Cell]]:
    """The names of the columns, a row for each seed of each setting, and one for all seeds of a setting."""
    word, settings = policies.settings.word.removesuffix("s"), policies.settings.rows
    several = ["setting"] if len(settings) > 1 else []
    lines: list[list[Cell]] = [[*several, word, "mean return", "std", "worst", "best", "mean length"]]
    for setting, rows in settings.items():
        label = [str(setting)] if several else []
        for row in rows:
            values = returns[row]
            numbers = values.mean(), values.std(), values.min(), values.max(), lengths[row].mean()
            lines.append([*label, str(policies.row[row]), *((number,) for number in numbers)])
        if len(rows) > 1:
            lines.append([*label, "IQM", estimate(returns[rows].mean(axis=1)), "", "", "", (lengths[rows].mean(),)])
    return lines


def summarise(arguments: Arguments, policies: TrainedPolicy, returns: np.ndarray, lengths: np.ndarray) -> dict:
    config: Config = policies.config
    settings = policies.settings.rows.items()
    scores = [{"values": each.values} | score_summary(returns[rows].mean(axis=1)) for each, rows in settings]
    return {
        "folder": arguments.folder,
        "run": policies.name,
        "which": arguments.which,
        "greedy": arguments.greedy,
        "seed": arguments.seed,
        "environment": config.env.name,
        "env_params": dict(config.env_params),
        "return": scores if len(scores) > 1 else scores[0],
        "returns": returns,
        "lengths": lengths,
        "versions": versions(),
        "hardware": hardware(),
    }


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

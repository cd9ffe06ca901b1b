"""Episodes of the trained policies in a folder: `grpo-jax evaluate runs/mine --num-episodes 1000`."""

import dataclasses
import time

import jax
import numpy as np
from rich.console import Console
from rich.progress import track

from grpo_jax import TrainedPolicy, evaluate
from grpo_jax.commands.harness.command import command, make_console
from grpo_jax.commands.harness.figures import Row, print_table
from grpo_jax.commands.harness.limits import Count, OutFile
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.commands.harness.trained import EpisodeArguments
from grpo_jax.devices.mesh import make_row_mesh, make_rows_function
from grpo_jax.recording.files import write_json
from grpo_jax.recording.statistics import estimate

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
        played = {"run": policies.name, "environment": policies.config.env.name, "returns": returns, "lengths": lengths}
        write_json(arguments.out, vars(arguments) | played)
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


def table(policies: TrainedPolicy, returns: np.ndarray, lengths: np.ndarray) -> list[Row]:
    """A row for each seed of each setting, and one for all seeds of a setting."""
    word, settings = policies.settings.word.removesuffix("s"), policies.settings.rows
    lines: list[Row] = []
    for setting, rows in settings.items():
        label = {"setting": str(setting)} if len(settings) > 1 else {}
        for row in rows:
            values = returns[row]
            numbers = {"mean return": values.mean(), "std": values.std(), "worst": values.min(), "best": values.max()}
            cells = {name: (number,) for name, number in (numbers | {"mean length": lengths[row].mean()}).items()}
            lines.append(label | {word: str(policies.row[row])} | cells)
        if len(rows) > 1:
            means = {"mean return": estimate(returns[rows].mean(axis=1)), "mean length": (lengths[rows].mean(),)}
            lines.append(lines[-1] | dict.fromkeys(("std", "worst", "best"), "") | {word: "IQM"} | means)
    return lines


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

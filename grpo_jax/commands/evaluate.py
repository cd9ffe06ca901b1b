"""Episodes of the trained policies in a folder: `grpo-jax evaluate runs/mine --num-episodes 1000`."""

import dataclasses
import time
from collections.abc import Iterator

import jax
import numpy as np
from rich.progress import track
from rich.table import Table

from grpo_jax import Config, TrainedPolicy, evaluate
from grpo_jax.commands.harness.command import command, make_console, provenance
from grpo_jax.commands.harness.figures import with_interval
from grpo_jax.commands.harness.limits import Count, OutFile
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.commands.harness.trained import EpisodeArguments
from grpo_jax.devices.mesh import make_row_mesh, make_rows_function
from grpo_jax.recording.files import write_json
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
    num_episodes = arguments.num_episodes
    policies = arguments.load("all")
    console = make_console()
    started = time.perf_counter()
    batches = play(policies, jax.random.key(arguments.seed), num_episodes, greedy=arguments.greedy)
    count = num_batches(len(policies), num_episodes)
    if console.is_interactive:
        batches = track(batches, "episodes", total=count, console=console, transient=True)
    returns, lengths = (np.concatenate(parts, axis=1) for parts in zip(*batches, strict=True))
    seconds = time.perf_counter() - started
    console.print(table(policies, returns, lengths))
    kind, word = "greedy" if arguments.greedy else "sampled", policies.settings.word
    word = word.removesuffix("s") if len(policies) == 1 else word
    console.print(
        f"{policies.config.env.name}: {num_episodes} {kind} episodes of each of {len(policies)} {word}, "
        f"{lengths.sum() / seconds:,.0f} steps/s",
        soft_wrap=True,
    )
    if arguments.out is not None:
        write_json(arguments.out, summarise(arguments, policies, returns, lengths))
        console.print(f"Written to {arguments.out}", soft_wrap=True)


def num_batches(num_rows: int, num_episodes: int) -> int:
    """Batches in which the episodes of each row are played, so that the memory is bounded."""
    return -(-num_episodes // max(1, EPISODES_AT_ONCE // num_rows))


def play(
    policies: TrainedPolicy, key: jax.Array, num_episodes: int, *, greedy: bool
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Returns and lengths `[R, ...]` of the next episodes of all rows, batch after batch."""
    num_rows, config = len(policies), policies.config
    batches = num_batches(num_rows, num_episodes)
    size = -(-num_episodes // batches)

    def episodes(policy, key):
        return evaluate(config, policy.state(key), key, num_episodes=size, greedy=greedy)

    episodes_of_rows = make_rows_function(episodes, make_row_mesh(num_rows))
    left = num_episodes
    for key_batch in jax.random.split(key, batches):
        played = episodes_of_rows(policies, jax.random.split(key_batch, num_rows))
        yield tuple(values[:, :left] for values in played)
        left -= size


def table(policies: TrainedPolicy, returns: np.ndarray, lengths: np.ndarray) -> Table:
    """For each setting, a line for each seed, and one for all of them."""
    word = policies.settings.word.removesuffix("s")
    rendered = Table(word, "mean return", "std", "worst", "best", "mean length", title=policies.name)
    for setting, rows in policies.settings.rows.items():
        if setting.values:
            rendered.add_section()
            rendered.add_row(str(setting))
        for row in rows:
            values = returns[row]
            numbers = values.mean(), values.std(), values.min(), values.max(), lengths[row].mean()
            rendered.add_row(str(policies.row[row]), *(f"{number:.4g}" for number in numbers))
        if len(rows) > 1:
            if not setting.values:
                rendered.add_section()
            interval = with_interval(returns[rows].mean(axis=1))
            rendered.add_row("IQM", interval, "", "", "", f"{lengths[rows].mean():.4g}")
    return rendered


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
        **provenance(),
    }


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

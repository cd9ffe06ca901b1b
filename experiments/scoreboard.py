"""Seconds from a new process to a return, of ours, rejax and plain PPO: `python -m experiments.scoreboard`.

From an empty compilation cache and from a warm one. What was measured becomes lines of `runs.jsonl`, to which each run
adds its own, and README.md beside it has the table of all lines. experiments/harness/cold_start.py says what
each implementation trains with.
"""

import dataclasses
import datetime
import functools
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich import progress

from grpo_jax.commands.harness import limits
from grpo_jax.commands.harness.command import command, make_console, num_cores
from grpo_jax.commands.harness.figures import markdown_table
from grpo_jax.commands.harness.limits import Count, OutFile
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.errors import ConfigError
from grpo_jax.recording.files import as_numbers, plain, write_text

from .harness import cold_start
from .harness.cold_start import SAME_WORK, TUNED, Task
from .harness.provenance import provenance
from .harness.reference_implementations import installed, rejax_version
from .harness.summaries import chosen

TASKS = {
    task.environment: task
    for task in (
        Task("CartPole-v1", 475.0, window=500),
        Task("Acrobot-v1", -100.0, window=500),
        Task("Catch-bsuite", 0.99, program_steps=20_000),
        Task("Breakout-MinAtar", 40.0, total_steps=10_000_000.0, window=1000),
        Task("tokens:sort-5", 0.95, total_steps=1_000_000.0),
    )
}
QUICK = ("CartPole-v1", "Acrobot-v1", "Catch-bsuite")
RUNS, PAGE = "runs.jsonl", "README.md"
HEAD = """# Scoreboard: seconds to a return

```bash
python -m experiments.scoreboard
```

Seconds from the start of a new process until the mean return of training reaches the number beside the task: first
with an empty compilation cache, then with what that process left in it. Medians over seeds, of which one without that
return counts as infinite. All implementations of a run take turns; × is the ratio to its first line. "Not reached" is
not within 2 million steps (Breakout-MinAtar 40 million, tokens:sort-5 4 million).

The first three PPOs do the same work (64 environments × 128 steps, 4 epochs of 4 minibatches, two networks of 64 ×
64, one learning rate); "PPO, tuned" and GRPO have the settings of `grpo-jax train`. The return is a mean over as many
iterations as the longest possible episode takes; for rejax it is the mean over the last episode of each environment.
A token task begins with a warm start, whose seconds count. Each run adds its lines to [runs.jsonl](runs.jsonl), from
which this page is made.
"""


@dataclasses.dataclass
class Arguments:
    """Measures the seconds to a return in new processes, adds a line for each implementation, and writes the table."""

    tasks: tuple[str, ...] = QUICK
    """Environments, each with the return to reach: CartPole-v1, Acrobot-v1, Catch-bsuite, Breakout-MinAtar (half a
    minute or many for each seed on a CPU) or tokens:sort-5 (GRPO only)."""
    implementations: tuple[Literal[(*SAME_WORK, *TUNED)], ...] = (*SAME_WORK, *TUNED)
    """What to measure; ratios are to the first."""
    num_seeds: Count = 3
    """Runs of each, of which the table shows the median."""
    note: str = ""
    """What the table says of this run, such as "beside other work"."""
    out: Path = Path("experiments/results/scoreboard")
    """Folder of runs.jsonl and README.md."""


def main(arguments: Arguments) -> None:
    console, began = make_console(), datetime.datetime.now()
    tasks = chosen(TASKS, arguments.tasks, "task")
    names = installed(arguments.implementations)
    if names != arguments.implementations:
        console.print("rejax is not installed (pip install '.[benchmark]'): it is left out.")
    implementations = {
        task: [name for name in names if name == "GRPO" or ":" not in task.environment] for task in tasks.values()
    }
    for task, able in implementations.items():
        if not able:
            raise ConfigError(f"of the implementations only GRPO can train on {task.environment}; add it")
    for name in (RUNS, PAGE):
        limits.check("--out", OutFile, arguments.out / name)
    lines = read_lines(arguments.out / RUNS)
    write(arguments.out, lines)  # a folder that cannot be written is noticed before all the measuring
    where = provenance() | {"cores_used": num_cores(), "began": f"{began:%Y-%m-%d %H:%M}", "note": arguments.note}
    where["versions"]["rejax"] = rejax_version()
    for task, able in implementations.items():
        track = functools.partial(progress.track, description=task.environment, console=console)
        rows = cold_start.measure(able, arguments.num_seeds, track, task)
        new = [where | line_of(name, task, rows) for name in able]
        lines += map(plain, new)
        write(arguments.out, lines)
    num_new = sum(map(len, implementations.values()))
    console.print(table(lines[-num_new:]), f"Results in {arguments.out}", soft_wrap=True)


def write(out: Path, lines: list[dict[str, Any]]) -> None:
    """Writes the lines and the page that is made of them."""
    write_text(out / RUNS, "".join(f"{json.dumps(line)}\n" for line in lines))
    write_text(out / PAGE, f"{HEAD}\n{table(lines)}")


def line_of(name: str, task: Task, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What was measured of an implementation: the seconds and steps to the return, one number for each seed."""
    runs = {row["cache"]: row["seeds"] for row in rows if row["implementation"] == name}
    seconds = {cache: [run[task.stages[-1]] for run in seeds] for cache, seeds in runs.items()}
    steps = [run["steps"] for run in runs["empty"]]
    return {"implementation": name, "task": task.environment, "return": task.solved, "seconds": seconds, "steps": steps}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of earlier runs, none without a file; raises ConfigError if one is damaged."""
    lines = []
    for number, text in enumerate(path.read_bytes().splitlines() if path.exists() else (), 1):
        try:
            line = json.loads(text)
            table([line])
            if not all(type(line[name]) is str for name in ("task", "began")):
                raise TypeError("task and began are texts")
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ConfigError(f"line {number} of {path} is damaged ({error!r}); remove it") from error
        lines.append(line)
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    """All runs as Markdown: by task, the newest run first."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        runs.setdefault((line["task"], line["began"]), []).append(line)
    newest = sorted(runs, key=lambda run: run[1], reverse=True)
    order = sorted(newest, key=lambda run: list(TASKS).index(run[0]) if run[0] in TASKS else len(TASKS))
    header = [
        "task",
        "implementation",
        "seconds, empty cache",
        "warm cache",
        "steps",
        "seeds reached it",
        "when, where, commit",
    ]
    return markdown_table(header, [cells(line, runs[run][0]) for run in order for line in runs[run]])


def cells(line: dict[str, Any], first: dict[str, Any]) -> list[str]:
    """A row of the table; `first` is the first line of its run."""

    def median(values: list[Any]) -> float:
        return float(np.median(as_numbers(values)))

    def seconds(cache: str) -> str:
        own, other = median(line["seconds"][cache]), median(first["seconds"][cache])
        return f"{own:.1f} ({own / other:.2f}×)" if np.isfinite([own, other]).all() else shown(own, ".1f")

    def shown(value: float, spec: str) -> str:
        return f"{value:{spec}}" if np.isfinite(value) else "not reached"

    commit = line["commit"] or "unknown"  # 40 digits, and a mark of changes
    where = f"{line['began']}, {line['hardware']}, jax {line['versions']['jax']}, {commit[:7]}{commit[40:]}"
    return [
        f"{line['task']}, {line['return']:g}",
        line["implementation"],
        seconds("empty"),
        seconds("warm"),
        shown(median(line["steps"]), ",.0f"),
        f"{np.isfinite(as_numbers(line['steps'])).sum()} of {len(line['steps'])}",
        f"{where}; {line['note']}" if line["note"] else where,
    ]


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

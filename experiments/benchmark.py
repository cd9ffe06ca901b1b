"""Training steps per second of rejax, of PPO in its common formulation, and of ours: `python -m experiments.benchmark`.

Every implementation does the same work: rollouts of equal length in as many environments, the same epochs and
minibatches, tanh networks of equal sizes. One process measures all of them in turn, several times, so that a slow
moment of the machine affects all of them. Compilation is timed separately, and the compilation cache is not used.
rejax comes with `pip install '.[benchmark]'`, which needs a version of distrax that works with JAX 0.10.

GRPO has no critic here, and its environments continue from window to window as PPO's do, so that both train on
num_envs × num_steps valid samples; the return of a window is compared over 8 environments. This is only a workload to
measure: to learn, groups have to start from the same state.
"""

import dataclasses
import datetime
import functools
from pathlib import Path
from typing import Literal

import numpy as np
from rich import progress
from rich.table import Table

from grpo_jax.commands.harness.command import command, make_console, new_folder, num_cores
from grpo_jax.commands.harness.limits import Count, NotNegative, OutFile
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.recording.figures import panels
from grpo_jax.recording.files import write_json
from grpo_jax.sweeps.runs import score_summary

from .harness import cold_start
from .harness import reference_implementations as reference
from .harness.provenance import provenance
from .harness.reference_implementations import Size
from .harness.workloads import IMPLEMENTATIONS, final_returns, make_cases, make_config, measure, ours

DEFAULT_NUM_ENVS = {"CartPole-v1": (64, 512, 2048)}


@dataclasses.dataclass
class Arguments:
    """Measures environment steps per second of training: ours and reference implementations, in one process."""

    environments: tuple[str, ...] = ("CartPole-v1", "Breakout-MinAtar")
    """Names of gymnax environments."""
    num_envs: tuple[Count, ...] = ()
    """Parallel environments, one measurement each; by default 64, 512 and 2048 for CartPole-v1, 512 for others."""
    implementations: tuple[Literal[IMPLEMENTATIONS], ...] = IMPLEMENTATIONS
    """What to measure; ratios are to the first."""
    num_seeds: tuple[Count, ...] = (1,)
    """Independent runs in one program (vmap), one measurement each."""
    num_steps: Count = Size._field_defaults["num_steps"]
    """Steps of each environment in one rollout."""
    num_epochs: Count = Size._field_defaults["num_epochs"]
    """Passes over a rollout."""
    num_minibatches: Count = Size._field_defaults["num_minibatches"]
    """Gradient steps in each pass."""
    hidden_sizes: tuple[Count, ...] = Size._field_defaults["hidden_sizes"]
    """Of the policy, and of the critic beside it."""
    repeats: Count = 7
    """Rounds; the table shows medians over them."""
    seconds: NotNegative = 0.3
    """How long one timing of one implementation takes, at least."""
    learning: bool = False
    """Also train ours and the plain PPO on CartPole-v1, 64 environments, 500,000 steps, 16 seeds, and compare."""
    cold: bool = False
    """Measure instead, in new processes, the seconds to the first metrics and to 475 on CartPole-v1, over 5 seeds."""
    parts: bool = True
    """Also measure parts of ours alone: random actions, rollout, update (with one seed)."""
    out: OutFile | None = None
    """JSON file for the results; a new one under runs/ if left out."""
    plot: OutFile | None = None
    """Draws steps per second over num_envs into this file, such as speed.png."""


def main(arguments: Arguments) -> None:
    console = make_console()
    now = datetime.datetime.now()
    out = arguments.out or new_folder("benchmark").with_suffix(".json")
    if out.exists():
        raise FileExistsError(f"{out} exists; choose another file (--out), or move the old one away")
    names = reference.installed(arguments.implementations)
    if names != arguments.implementations:
        console.print("rejax is not installed (pip install '.[benchmark]'): it is left out.")
    results = provenance() | {
        "cores_used": num_cores(),
        "date": f"{now:%Y-%m-%d}",
        "arguments": dataclasses.asdict(arguments),
        "results": [],
    }
    results["versions"]["rejax"] = reference.rejax_version()
    if arguments.cold:
        results["results"] = cold_start.measure(names, 5, functools.partial(progress.track, console=console))
        write_json(out, results)
        console.print(cold_table(results["results"]), f"Results in {out}", soft_wrap=True)
        return
    measurements = [
        (environment, num_envs, num_seeds)
        for environment in arguments.environments
        for num_envs in arguments.num_envs or DEFAULT_NUM_ENVS.get(environment, (512,))
        for num_seeds in arguments.num_seeds
    ]
    for environment, num_envs, num_seeds in measurements:
        size = Size(
            num_envs, arguments.num_steps, arguments.num_epochs, arguments.num_minibatches, arguments.hidden_sizes
        )
        cases = make_cases(names, environment, size, num_seeds, parts=arguments.parts and num_seeds == 1)
        rows = measure(cases, arguments.repeats, arguments.seconds)
        measured = {"environment": environment, "num_envs": num_envs, "num_seeds": num_seeds}
        results["results"] += [measured | row for row in rows]
        console.print(table(f"{environment}, {num_envs} envs, {num_seeds} seeds", rows))
        write_json(out, results)  # after each measurement, so that an interruption keeps them
    if arguments.learning:
        results["learning"] = compare_learning()
        write_json(out, results)
        for name, result in results["learning"].items():
            low, high = result["ci95"]
            console.print(f"{name}: final return {result['iqm']:.1f} [{low:.1f}, {high:.1f}]", soft_wrap=True)
    if arguments.plot is not None:
        plot(results["results"], arguments.plot)
    console.print(f"Results in {out}", soft_wrap=True)


def compare_learning() -> dict[str, dict]:
    """Final returns of our PPO and of plain PPO after equal steps: IQM and 95% interval of 16 seeds."""
    environment, size, num_seeds, total_steps = "CartPole-v1", Size(64), 16, 500_000
    config = make_config(environment, size, critic=True)
    results = {}
    for name, implementation in {"plain PPO": reference.plain_ppo(environment, size), "PPO": ours(config)}.items():
        returns = final_returns(implementation, num_seeds, total_steps // size.num_samples)
        results[name] = score_summary(returns)
    return results


def table(title: str, rows: list[dict]) -> Table:
    columns = ["", "steps/s", "slowest … fastest", f"× {rows[0]['ratio_to']}", "of matmul rate", "memory", "compile"]
    rendered = Table(*columns, title=f"{title}; matmul {rows[0]['matmul_flops_per_second'] / 1e9:.0f} GFLOP/s")
    for row in rows:
        ratio, fraction = row["ratio"], row["roofline_fraction"]
        rendered.add_row(
            row["implementation"],
            f"{row['steps_per_second']:,.0f}",
            f"{row['steps_per_second_low']:,.0f} … {row['steps_per_second_high']:,.0f}",
            "" if np.isnan(ratio) else f"{ratio:.2f}",
            "" if np.isnan(fraction) else f"{fraction:.0%}",
            f"{row['memory_bytes'] / 2**20:,.0f} MiB",
            f"{row['compile_seconds']:.1f} s",
        )
    return rendered


def cold_table(rows: list[dict]) -> Table:
    """Medians of the seconds from the beginning of a process to the end of each stage, and the size of the program."""
    rendered = Table("", "cache", *cold_start.CARTPOLE.stages, *cold_start.PROGRAMS, title="CartPole-v1: seconds until")
    for row in rows:
        seconds = (f"{row[stage]:.1f}" for stage in cold_start.CARTPOLE.stages)
        rendered.add_row(
            row["implementation"], row["cache"], *seconds, *(f"{row[x]:,.0f}" for x in cold_start.PROGRAMS)
        )
    return rendered


def plot(results: list[dict], path: Path) -> None:
    """One panel for each environment: steps per second over num_envs, with the first number of seeds."""
    from matplotlib.ticker import EngFormatter

    environments = list(dict.fromkeys(row["environment"] for row in results))
    results = [row for row in results if row["num_seeds"] == results[0]["num_seeds"]]
    names = [name for name in IMPLEMENTATIONS if name in {row["implementation"] for row in results}]
    with panels(path, len(environments), size=(5.6, 4.2)) as (_, axes):
        for environment, axis in zip(environments, axes, strict=True):
            here = sorted((x for x in results if x["environment"] == environment), key=lambda row: row["num_envs"])
            for i, name in enumerate(names):
                rows = [row for row in here if row["implementation"] == name]
                x, middle, low, high = (
                    [row[field] for row in rows]
                    for field in ("num_envs", "steps_per_second", "steps_per_second_low", "steps_per_second_high")
                )
                axis.plot(x, middle, color=f"C{i}", marker="o", markersize=4, label=name)
                axis.fill_between(x, low, high, color=f"C{i}", alpha=0.2, linewidth=0)
            axis.set(title=environment, xlabel="parallel environments", xscale="log", ylim=(0, None))
            ticks = sorted({row["num_envs"] for row in here})
            axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
            axis.minorticks_off()
            axis.yaxis.set_major_formatter(EngFormatter(sep=""))
            axis.legend(frameon=False)
        axes[0].set_ylabel("environment steps per second of training")


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

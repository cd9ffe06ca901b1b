"""Training steps per second beside rejax and the common formulation: `python -m experiments.benchmark`.

Every implementation does the same work: rollouts of 128 steps in each environment, 4 epochs of 4 minibatches, tanh
networks of equal sizes. One process measures all of them in turn, again and again, so that a slow moment of the machine
touches all alike. Compilation is timed apart, and the compilation cache is not used.

GRPO here has no critic, and its environments run on from window to window as PPO's do, so that both learn from
num_envs × 128 valid samples: the return of a window is compared over 8 environments. That is a workload to measure;
to learn so, groups have to start from one state.
"""

import contextlib
import dataclasses
import datetime
import tempfile
import time
from pathlib import Path
from typing import Literal

import jax
import numpy as np
import tyro
from rich.table import Table

from experiments.harness import peers
from experiments.harness.command import command, hardware, num_cores, versions
from experiments.harness.console import make_console
from experiments.harness.workloads import (
    WHOLE,
    commit,
    final_returns,
    make_cases,
    make_config,
    measure,
    ours,
)
from grpo_jax import Hyperparams, run
from grpo_jax.errors import ConfigError
from grpo_jax.recording.alarms import Alarms
from grpo_jax.recording.files import write_json
from grpo_jax.recording.logbook import Logbook
from grpo_jax.recording.statistics import bootstrap_interval, iqm
from grpo_jax.recording.trackers import TensorBoard

DEFAULT_NUM_ENVS = {"CartPole-v1": (64, 512, 2048)}


@dataclasses.dataclass
class Arguments:
    """Measures environment steps per second of training, ours beside its peers, all in one process."""

    environments: tuple[str, ...] = ("CartPole-v1", "Breakout-MinAtar")
    """Names of gymnax environments."""
    num_envs: tuple[int, ...] = ()
    """Parallel environments, one measurement each; if left out 64, 512 and 2048 for CartPole-v1, else 512."""
    implementations: tuple[Literal["rejax PPO", "plain PPO", "PPO", "GRPO"], ...] = WHOLE
    """What to measure; ratios are to the first."""
    num_seeds: tuple[int, ...] = (1,)
    """Independent runs in one program (vmap), one measurement each."""
    hidden_sizes: tuple[int, ...] = peers.HIDDEN_SIZES
    """Of the policy, and of the critic beside it."""
    repeats: int = 7
    """Rounds; the table shows medians over them."""
    seconds: float = 0.3
    """How long one timing of one implementation takes, at least."""
    learning: bool = False
    """Also train ours and the plain PPO on CartPole-v1, 64 environments, 500,000 steps, 16 seeds, and compare."""
    overhead: bool = False
    """Also measure what metrics.jsonl, TensorBoard's files and checkpoints cost a run."""
    parts: bool = True
    """Also measure random actions, the rollout and the update alone (with one seed)."""
    out: Path | None = None
    """JSON file for the results; a new one under runs/ if left out."""
    plot: Path | None = None
    """Draws steps per second over num_envs into this file, such as speed.png."""


def main(arguments: Arguments) -> None:
    console = make_console()
    now = datetime.datetime.now()
    out = arguments.out or Path("runs") / f"benchmark_{now:%Y-%m-%d_%H-%M-%S}.json"
    counts = arguments.repeats, *arguments.num_envs, *arguments.num_seeds, *arguments.hidden_sizes
    if min(counts) < 1 or not arguments.implementations:
        raise ConfigError(
            "--repeats, --num-envs, --num-seeds and --hidden-sizes take positive integers, --implementations some names"
        )
    if out.exists():
        raise FileExistsError(f"{out} exists; choose another file (--out), or move the old one away")
    out.parent.mkdir(parents=True, exist_ok=True)
    names = arguments.implementations
    if "rejax PPO" in names and peers.rejax_version() is None:
        names = tuple(name for name in names if name != "rejax PPO")
        if not names:
            raise ConfigError("rejax is not installed (pip install '.[benchmark]'), and nothing else was asked for")
        console.print("rejax is not installed (pip install '.[benchmark]'): it is left out.")
    record = {
        "hardware": hardware(),
        "cores_used": num_cores(),
        "versions": versions() | {"rejax": peers.rejax_version()},
        "commit": commit(),
        "date": f"{now:%Y-%m-%d}",
        "arguments": dataclasses.asdict(arguments),
        "results": [],
    }
    for environment in arguments.environments:
        for num_envs in arguments.num_envs or DEFAULT_NUM_ENVS.get(environment, (512,)):
            for num_seeds in arguments.num_seeds:
                cases = make_cases(
                    names,
                    environment,
                    num_envs,
                    num_seeds,
                    hidden_sizes=arguments.hidden_sizes,
                    parts=arguments.parts and num_seeds == 1,
                )
                rows = measure(cases, arguments.repeats, arguments.seconds)
                where = {"environment": environment, "num_envs": num_envs, "num_seeds": num_seeds}
                record["results"] += [where | row for row in rows]
                console.print(table(f"{environment}, {num_envs} envs, {num_seeds} seeds", rows))
                write_json(out, record)  # after each, so that an interrupted sweep keeps what it has
    if arguments.learning:
        record["learning"] = compare_learning()
        write_json(out, record)
        for name, result in record["learning"].items():
            low, high = result["ci95"]
            console.print(f"{name}: final return {result['iqm']:.1f} [{low:.1f}, {high:.1f}]", soft_wrap=True)
    if arguments.overhead:
        record["overhead"] = overhead(arguments.repeats)
        write_json(out, record)
        wall, cores = (record["overhead"][f"share_of_{name}_seconds"] for name in ("wall", "core"))
        console.print(f"Recording a run adds {wall:.1%} to its time, {cores:.1%} to that of all cores", soft_wrap=True)
    if arguments.plot is not None:
        plot(record["results"], arguments.plot)
    console.print(f"Results in {out}", soft_wrap=True)


def compare_learning() -> dict[str, dict]:
    """What ours and the plain PPO have learnt after equal steps: IQM and 95% interval of 16 seeds."""
    environment, num_envs, num_seeds, total_steps = "CartPole-v1", 64, 16, 500_000
    config = make_config(environment, num_envs, critic=True)
    results = {}
    for name, implementation in {"plain PPO": peers.plain_ppo(environment, num_envs), "PPO": ours(config)}.items():
        returns = final_returns(implementation, num_seeds, total_steps // (num_envs * peers.NUM_STEPS))
        results[name] = {"iqm": iqm(returns), "ci95": bootstrap_interval(returns), "per_seed": returns}
    return results


def overhead(repeats: int) -> dict:
    """What recording adds to a PPO run, on the clock and on all cores: `metrics.jsonl`, TensorBoard, checkpoints.

    Of 100 iterations of 512 environments, each reported, with three checkpoints; from the end of the first iteration.
    """
    from grpo_jax.recording.checkpoint import Checkpoints

    config = make_config("CartPole-v1", 512, critic=True)
    hyperparams = Hyperparams(total_steps=100.0 * config.steps_per_iteration)
    keys = jax.random.split(jax.random.key(0), 1)

    def seconds(records: bool) -> np.ndarray:
        marks = []
        with contextlib.ExitStack() as stack:
            report, save = [lambda chunk: marks.append((time.perf_counter(), time.process_time()))], None
            if records:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                save = stack.enter_context(Checkpoints(folder / "checkpoints", {}, every=50)).update
                book = Logbook(
                    folder,
                    run="PPO",
                    total_steps=int(hyperparams.total_steps),
                    num_seeds=1,
                    console=make_console(quiet=True),
                    alarms=Alarms(config.env.action_space),
                    trackers=[TensorBoard(folder / "tensorboard")],
                )
                report.append(stack.enter_context(book).record)
            run(
                config,
                hyperparams,
                keys,
                report=lambda chunk: [each(chunk) for each in report],
                save=save,
                num_chunks=100,
            )
        return np.subtract((time.perf_counter(), time.process_time()), marks[0])

    times = np.array([[seconds(records) for records in (False, True)] for _ in range(repeats)])
    wall, cores = np.median(times[:, 1], axis=0) / np.median(times[:, 0], axis=0) - 1
    return {"share_of_wall_seconds": wall, "share_of_core_seconds": cores, "seconds": times}


def table(title: str, rows: list[dict]) -> Table:
    """The implementations side by side."""
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


def plot(results: list[dict], path: Path) -> None:
    """One panel for each environment: steps per second over num_envs; seeds apart from the first are left out."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    environments = list(dict.fromkeys(row["environment"] for row in results))
    shown = [row for row in results if row["num_seeds"] == results[0]["num_seeds"]]
    names = list(dict.fromkeys(row["implementation"] for row in shown if row["implementation"] in WHOLE))
    size = (5.6 * len(environments), 4.2)
    figure, axes = plt.subplots(1, len(environments), figsize=size, squeeze=False, layout="constrained")
    for environment, axis in zip(environments, axes[0], strict=True):
        for i, name in enumerate(names):
            rows = [row for row in shown if (row["environment"], row["implementation"]) == (environment, name)]
            rows.sort(key=lambda row: row["num_envs"])
            x, middle, low, high = (
                [row[field] for row in rows]
                for field in ("num_envs", "steps_per_second", "steps_per_second_low", "steps_per_second_high")
            )
            axis.plot(x, middle, color=f"C{i}", marker="o", markersize=4, label=name)
            axis.fill_between(x, low, high, color=f"C{i}", alpha=0.2, linewidth=0)
        axis.set(title=environment, xlabel="parallel environments", xscale="log", ylim=(0, None))
        ticks = sorted({row["num_envs"] for row in shown if row["environment"] == environment})
        axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axis.minorticks_off()
        axis.yaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    axes[0, 0].set_ylabel("environment steps per second of training")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    command(lambda: main(tyro.cli(Arguments)))

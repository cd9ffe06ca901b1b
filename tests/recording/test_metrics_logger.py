import io
import json
import math
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from probes import Probe
from rich.console import Console
from small import small_config

from grpo_jax import Hyperparams
from grpo_jax.recording.files import write_json
from grpo_jax.recording.metrics_logger import MetricsLogger
from grpo_jax.recording.run_folder import StopSignal
from grpo_jax.runs.progress import Chunk
from grpo_jax.runs.run_spec import RunSpec, Setting


def make_chunk(returns, *, iteration=0, made=10, seconds=1.0, before=0, **metrics):
    """A chunk in which each seed makes `made` steps an iteration."""
    returns = np.asarray(returns, np.float32)
    made = np.broadcast_to(np.asarray(made), returns.shape)
    steps = before + np.cumsum(made, axis=0, dtype=np.int64)
    metrics = {name: np.asarray(values) for name, values in metrics.items()}
    return Chunk({"episode/return_mean": returns, "environment/steps": made, **metrics}, steps, iteration, seconds)


def make_logger(directory, name, total_steps, num_rows, console):
    class Spec(RunSpec):
        setting = property(lambda self: Setting({"name": self.label}))

    config, keys = small_config("ppo", Probe(), num_envs=1, num_steps=10), jax.random.split(jax.random.key(0), num_rows)
    spec = Spec(name, config, Hyperparams(total_steps=float(total_steps)), keys)
    return MetricsLogger(directory, spec, console=console)


def make_console(terminal=False):
    return Console(file=io.StringIO(), force_terminal=terminal, force_interactive=terminal, width=120)


def strict_json(text):
    """Parse, refusing NaN and Infinity, which are not JSON."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def read_lines(directory):
    return [strict_json(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_one_line_an_iteration_with_null_for_what_is_not_finite_and_exact_steps(tmp_path):
    with make_logger(tmp_path, "grpo", 100, 2, False) as logger:
        logger.record(make_chunk([[1.5, np.nan], [np.inf, 2.5]]))
        logger.record(make_chunk([[3.0, -np.inf]], iteration=2, before=2**40 + 1))
    run = {"values": {"name": "grpo"}, "environment": ""}
    assert read_lines(tmp_path) == [
        {"run": run, "iteration": i, "environment_steps": s, "episode/return_mean": r, "environment/steps": [10, 10]}
        for i, s, r in [(0, [10, 10], [1.5, None]), (1, [20, 20], [None, 2.5]), (2, [2**40 + 11] * 2, [3.0, None])]
    ]


def test_rows_of_a_seed_that_is_done_are_null(tmp_path):
    with make_logger(tmp_path, "grpo", 20, 2, False) as logger:
        skipped = {"optim/skipped_updates": [[0, 1], [0, 5]]}
        logger.record(make_chunk([[1.0, 2.0], [3.0, 99.0]], made=[[10, 20], [10, 0]], **skipped))
    first, second = read_lines(tmp_path)
    assert first["episode/return_mean"] == [1.0, 2.0]
    assert second["episode/return_mean"] == [3.0, None]
    assert second["optim/skipped_updates"] == [0, None]
    assert second["environment_steps"] == [20, 20]
    assert logger.skipped_updates.tolist() == [0, 1]


def test_without_a_terminal_a_plain_line_every_ten_seconds(monkeypatch):
    console, now = make_console(), [0.0]
    monkeypatch.setattr("grpo_jax.recording.metrics_logger.time.monotonic", lambda: now[0])
    with make_logger(None, "ppo [x]", 1000, 3, console) as logger:
        for i in range(100):
            now[0] += 1
            logger.record(make_chunk([[1.0, 5.0, np.nan]], iteration=i, before=10 * i, seconds=2.0 + i))
    first, *lines, summary = console.file.getvalue().splitlines()
    assert first.startswith("ppo [x]: compiling;")
    assert [line.split(",")[0] for line in lines] == [f"ppo [x]: {percent}%" for percent in range(10, 101, 10)]
    # 3 seeds make 30 steps a second; the first chunk's 2 seconds, compile included, no longer count at 10%.
    assert lines[0] == "ppo [x]: 10%, iteration 10, return 3 (1..5), 0:01:30 left, 30 steps/s"
    assert summary == "ppo [x]: 3,000 environment steps in 0:01:41 (30 steps/s), return 3 (1..5)"


def test_a_seed_keeps_its_last_known_return():
    console = make_console()
    with make_logger(None, "a", 100, 3, console) as logger:
        logger.record(make_chunk([[1.0, 2.0, 3.0], [np.nan, 20.0, np.nan]]))
        logger.record(make_chunk([[np.nan, np.nan, 30.0]], iteration=2, made=[[10, 10, 0]]))
    assert console.file.getvalue().splitlines()[-1].endswith("return 3 (1..20)")


def test_on_a_terminal_several_runs_follow_each_other():
    console = make_console(terminal=True)
    for run in ("grpo", "ppo"):
        with make_logger(None, run, 100, 1, console) as logger:
            for i in range(10):
                logger.record(make_chunk([[float(i)]], iteration=i, before=10 * i, seconds=1.0 + i))
    shown = console.file.getvalue()
    assert "100%" in shown
    for run in ("grpo", "ppo"):
        assert shown.count(f"{run}: 100 environment steps in 0:00:10 (10 steps/s), return 9") == 1


@pytest.mark.parametrize("error, cause", [(RuntimeError(), "RuntimeError"), (StopSignal(signal.SIGTERM), "a signal")])
def test_without_records_and_after_an_error_the_summary_stands(error, cause):
    console = make_console()
    with pytest.raises(type(error)), make_logger(None, "a", 100, 1, console):
        raise error
    summary = f"a: 0 environment steps in 0:00:00 (0 steps/s), no return yet; stopped early by {cause}\n"
    assert console.file.getvalue().endswith(summary)


def test_the_summary_counts_skipped_updates():
    of_seeds = {
        "return 1 (1..1)": [[0, 0, 0], [0, 0, 0]],
        "1 update skipped: non-finite loss or gradient in seeds [1]": [[0, 1, 0], [0, 0, 0]],
        "9 updates skipped: non-finite loss or gradient in seeds [0, 2]": [[4, 0, 0], [3, 0, 2]],
    }
    for said, skipped in of_seeds.items():
        with make_logger(None, "a", 20, 3, console := make_console()) as logger:
            logger.record(make_chunk(np.ones((2, 3)), **{"optim/skipped_updates": skipped}))
        assert console.file.getvalue().endswith(f"{said}\n")


def test_write_json_is_strict(tmp_path):
    value = {
        "iqm": np.float32(1.5),
        "ci95": (math.nan, np.inf),
        "per_seed": np.array([1.0, np.nan]),
        "count": np.int64(2**40),
        "out": Path("runs/a"),
        "nested": [{"ok": np.bool_(True), "none": None, "text": "x"}],
    }
    write_json(tmp_path / "summary.json", value)
    as_json = {"iqm": 1.5, "ci95": [None, "inf"], "per_seed": [1.0, None], "out": str(Path("runs/a"))}
    assert strict_json((tmp_path / "summary.json").read_text()) == value | as_json
    assert '"ci95": [null, "inf"],\n' in (tmp_path / "summary.json").read_text(), "numbers of a list are in one line"


def test_write_json_replaces_whole_files_only(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_json(path, {"run": 1})
    with pytest.raises(TypeError):
        write_json(path, {"run": object()})

    def fail(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail)
        with pytest.raises(OSError, match="disk full"):
            write_json(path, {"run": 2})
    assert json.loads(path.read_text()) == {"run": 1}
    assert list(tmp_path.iterdir()) == [path]
    write_json(path, {"run": 3})
    assert json.loads(path.read_text()) == {"run": 3}

"""TrainingWarnings, trackers, signals, and what is read of metrics.jsonl."""

import dataclasses
import importlib.machinery
import json
import math
import os
import signal
import struct
import sys
import types

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from grpo_jax.environments.spaces import Box, Discrete, MultiDiscrete
from grpo_jax.errors import ConfigError
from grpo_jax.recording.folder_lock import deferred_signals
from grpo_jax.recording.metrics_file import read_metrics, truncate_metrics
from grpo_jax.recording.run_folder import Recording
from grpo_jax.recording.trackers import Guarded, TensorBoard, WeightsAndBiases, log_table, over_seeds
from grpo_jax.recording.training_warnings import DEAD_ITERATIONS, TrainingWarnings
from grpo_jax.runs.memory import Memory
from grpo_jax.runs.settings import Setting, settings_of


def watched(space, **columns):
    metrics = {name.replace("__", "/"): np.array(values, float) for name, values in columns.items()}
    return TrainingWarnings(space)(7, metrics)


def test_a_healthy_run_is_quiet():
    assert (
        watched(
            Discrete(2),
            policy__entropy=[[0.6, np.nan], [0.02, 0.3]],
            policy__kl_behaviour=[[0.01, np.nan], [0.2, 0.9]],
            group__zero_variance_fraction=[[0.0, np.nan], [1.0, 0.99]],
            advantage__abs_mean=[[0.8, np.nan], [0.0, 0.1]],
            optim__skipped_updates=[[0, np.nan], [0, 0]],
        )
        == []
    )


@pytest.mark.parametrize(
    "space, entropy, collapsed",
    [
        (Discrete(2), 0.0068, True),
        (Discrete(2), 0.0071, False),
        (MultiDiscrete((2, 4)), 0.0207, True),
        (Box((-1.0,), (1.0,)), 0.0, False),
        (Box((-1.0,), (1.0,)), 1.42 + math.log(0.009), True),
        (Box((-0.1,), (0.1,)), 1.42 + math.log(0.1 * 0.012), False),
        (Box((-3.4028235e38,), (3.4028235e38,)), 1.42 + math.log(0.012), False),
        (Box((-1.0, 0.0), (1.0, 2.0)), 2 * (1.42 + math.log(0.012)), False),
    ],
)
def test_a_collapsed_entropy_depends_on_the_actions(space, entropy, collapsed):
    assert bool(watched(space, policy__entropy=[[entropy]])) == collapsed


def test_each_warning_says_where_and_what_to_try():
    (kl,) = watched(Discrete(2), policy__kl_behaviour=[[0.1, 0.1, 0.1], [0.1, 3.0, 2.0]])
    assert "at iteration 8 in seeds [1, 2]" in kl and "kl_limit" in kl
    (skipped,) = watched(Discrete(2), optim__skipped_updates=[[2.0]])
    assert "at iteration 7." in skipped.replace(",", ".") and "--debug-nans" in skipped and "seeds" not in skipped
    (entropy,) = watched(Discrete(2), policy__entropy=np.zeros((1, 40)))
    assert "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, and 30 more]" in entropy and "entropy_coef" in entropy
    columns = {"policy__entropy": [[0.5, 0.5], [0.5, 0]], "group__zero_variance_fraction": [[0, 1], [0.25, 0.75]]}
    (entropy,) = watched(Discrete(2), **columns, advantage__abs_mean=[[1, 1], [1, 1]])
    assert "it hardly explores, and in 75% of groups all scores are equal. If" in entropy


def test_groups_are_dead_after_long_and_across_chunks_and_reported_once():
    warn = TrainingWarnings(Discrete(2))
    none = {"advantage/abs_mean": np.array([[0.0, np.nan]])}  # NaN: every sample left out
    dead = [none | {"group/zero_variance_fraction": np.array([[1.0, 1.0]])}] * 30
    dead[4] = none | {"group/zero_variance_fraction": np.array([[1.0, 0.9]])}
    warnings = [warn(i, chunk) for i, chunk in enumerate(dead)]
    assert [i for i, messages in enumerate(warnings) if messages] == [DEAD_ITERATIONS - 1]
    assert "in seeds [0]" in warnings[DEAD_ITERATIONS - 1][0] and "group_size" in warnings[DEAD_ITERATIONS - 1][0]


def test_groups_of_equal_scores_with_advantages_are_not_dead():
    equal = {"group/zero_variance_fraction": np.ones((30, 1)), "advantage/abs_mean": np.full((30, 1), 0.3)}
    assert TrainingWarnings(Discrete(2))(0, equal) == []


def test_many_seeds_become_quartiles_and_one_stays_itself():
    values = np.random.default_rng(0).normal(size=(4, 9))
    values[1, :4] = np.nan
    values[2] = np.nan
    rows = over_seeds(np.full((4, 9), 7), {"loss/policy": values})
    for (step, row), known in zip(rows, [values[0], values[1, 4:], [], values[3]], strict=True):
        assert step == 7
        if len(known) == 0:
            assert row == {}
        else:
            expected = np.quantile(known, [0.5, 0.25, 0.75])
            np.testing.assert_allclose([row["loss/policy" + end] for end in ("", "_q25", "_q75")], expected)
    assert over_seeds(np.array([[1], [2]]), {"a": np.array([[1.5], [np.inf]])}) == [(1, {"a": 1.5}), (2, {})]


def events(directory):
    """Of all event files: a length, a checksum, an event, a checksum; again and again."""
    for path in sorted(directory.iterdir()):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            yield Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]


def test_tensorboard_gets_every_iteration_and_forgets_what_is_made_again(tmp_path):
    tracker = TensorBoard(tmp_path, settings_of({}, 3))
    tracker.record(0, np.array([[10, 20, 30], [20, 40, 60]]), {"policy/entropy": np.array([[1.0, 2.0, 9.0]] * 2)})
    tracker.close()
    scalars = [(event.step, {v.tag: v.simple_value for v in event.summary.value}) for event in events(tmp_path)]
    expected = {"policy/entropy": 2.0, "policy/entropy_q25": 1.5, "policy/entropy_q75": 5.5}
    assert [pair for pair in scalars if pair[1]] == [(20, expected), (40, expected)]
    TensorBoard(tmp_path, settings_of({}, 3), steps=np.array([10, 20, 90])).close()
    assert [event.step for event in events(tmp_path) if event.HasField("session_log")][-1] in (0, 21)


def test_weights_and_biases_goes_on_with_its_run(tmp_path, monkeypatch):
    calls, settings = [], settings_of({}, 1)
    spec = types.SimpleNamespace(setting=Setting({"name": "grpo"}), rows=(), settings=settings)
    monkeypatch.setattr("grpo_jax.recording.trackers.describe_run", lambda spec: {"hyperparams": {"a": 1}})

    class Run:
        def define_metric(self, names, step_metric):
            assert (names, step_metric) == ("*", "environment_steps")

        def log(self, scalars, step):
            calls.append((step, scalars))

        def finish(self):
            calls.append("finished")

    fake = types.ModuleType("wandb")
    fake.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    fake.init = lambda **arguments: calls.append(arguments) or Run()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    for iteration in (0, 1):
        tracker = WeightsAndBiases(tmp_path, spec, mode="offline")
        tracker.record(iteration, np.array([[5]]), {"loss/policy": np.array([[0.5]])})
        tracker.close()
    first, second = calls[0], calls[3]
    assert first == second and first["mode"] == "offline" and first["resume"] == "allow"
    assert first["project"] == "mine" and first["config"] == {"hyperparams": {"a": 1}}
    assert calls[1] == (0, {"loss/policy": 0.5, "environment_steps": 5}) and calls[4][0] == 1 and calls[5] == "finished"


@pytest.mark.parametrize("where", ["begin", "record", "close"])
def test_a_tracker_that_fails_is_left_out(where, caplog):
    class Failing:
        def __init__(self):
            self.done("begin")

        def record(self, *chunk):
            self.done("record")

        def close(self):
            self.done("close")

        def done(self, step):
            calls.append(step)
            if step == where:
                raise BrokenPipeError(32, "Broken pipe")

    calls: list[str] = []
    tracker = Guarded(Failing)
    for iteration in range(2):
        tracker.call("record", iteration, np.array([[5]]), {})
    tracker.call("close")
    expected = {"begin": ["begin"], "record": ["begin", "record"], "close": ["begin", "record", "record", "close"]}
    assert calls == expected[where]
    assert caplog.text.count("failed (BrokenPipeError: [Errno 32] Broken pipe); the run goes on without it.") == 1


def test_a_table_is_beside_the_metrics_of_its_iteration(monkeypatch):
    logged, fake = [], types.ModuleType("wandb")
    fake.Table, fake.run = (
        lambda **parts: parts,
        types.SimpleNamespace(log=lambda *call, step: logged.append((*call, step))),
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    log_table("samples", ("text", "reward"), [("a", 1.0)], iteration=10)
    assert logged == [({"samples": {"columns": ["text", "reward"], "data": [["a", 1.0]]}}, 9)]


def test_without_weights_and_biases_it_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="wandb is not installed: pip install wandb"):
        Recording(tmp_path, wandb="offline").check()


def test_signals_wait_and_a_second_interrupt_does_not():
    # As in a terminal: what a shell runs in the background ignores SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    reached = []
    with pytest.raises(KeyboardInterrupt), deferred_signals() as received:
        os.kill(os.getpid(), signal.SIGINT)
        reached.append(list(received))
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("never")
    assert reached == [[signal.SIGINT]]
    with pytest.raises(KeyboardInterrupt):  # one that nobody asked for
        with deferred_signals():
            os.kill(os.getpid(), signal.SIGINT)
        reached.append("never")
    with deferred_signals() as received:
        pass
    assert received == [] and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and len(reached) == 1


def test_exhausted_memory_says_how_many_rows_would_fit(monkeypatch):
    memory = Memory(num_rows=100)
    assert "100 rows" in memory.advice() and "num_seeds" in memory.advice() and "would fit" not in memory.advice()
    memory.needed = 40 * 2**30
    monkeypatch.setattr("grpo_jax.runs.memory.device_memory", lambda: 16 * 2**30)
    assert "need 40.0 GiB of 16.0 GiB; about 36 would fit" in memory.advice()


def test_a_record_is_read_and_cut_whatever_a_killed_process_left(tmp_path):
    one, other = (Setting({"name": name}, "Probe") for name in "ab")
    runs = [dataclasses.asdict(one), dataclasses.asdict(other)]
    lines = [
        {"run": run, "iteration": i, "environment_steps": [10 * i, 5], "environment/steps": [9, None], "x": [0.1, None]}
        for run in runs
        for i in range(3)
    ]
    path = tmp_path / "metrics.jsonl"
    whole = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_text(whole + '{"run": "b", "iteration": 3, "environ')
    chunk = read_metrics(tmp_path)[other]
    assert chunk.steps.tolist() == [[0, 5], [10, 5], [20, 5]]
    assert chunk.metrics["environment/steps"].tolist() == [[9, 0]] * 3
    assert chunk.metrics["x"].dtype == np.float32 and np.isnan(chunk.metrics["x"][:, 1]).all()
    truncate_metrics(tmp_path, other, 3)
    assert path.read_text() == whole
    truncate_metrics(tmp_path, one, 1)
    assert [(line["run"], line["iteration"]) for line in map(json.loads, path.read_text().splitlines())] == [
        *[(runs[0], 0), (runs[1], 0), (runs[1], 1), (runs[1], 2)]
    ]
    assert set(read_metrics(tmp_path)) == {one, other}

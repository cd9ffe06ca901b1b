"""Trackers: what TensorBoard and Weights & Biases get, of seeds and of settings, and what a failure costs."""

import importlib
import struct
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import Probe
from tensorboardX.proto.event_pb2 import Event

from grpo_jax import Config, Hyperparams
from grpo_jax.errors import ConfigError
from grpo_jax.policies import MLP
from grpo_jax.recording.metrics_logger import MetricsLogger
from grpo_jax.recording.recorder import Recorder
from grpo_jax.recording.run_folder import Recording
from grpo_jax.recording.trackers import TensorBoard, WeightsAndBiases, over_seeds
from grpo_jax.runs.progress import Chunk
from grpo_jax.runs.run_spec import RunSpec, Setting

CONFIG = Config(Probe(), "ppo", num_envs=4, num_steps=8, num_epochs=1, num_minibatches=1, network=MLP((4,)))
KEYS = jax.random.split(jax.random.key(0), 4)
# Two settings of two seeds each.
SPEC = RunSpec("ppo", CONFIG, Hyperparams(learning_rate=jnp.array([1e-3, 1e-2, 1e-3, 1e-2])), KEYS)
VALUES = {"episode/return_mean": np.array([[40.0, 1.0, 50.0, 60.0]])}


@pytest.fixture
def wandb(monkeypatch):
    """A module in place of Weights & Biases, and the calls that it gets."""
    calls, fake = [], types.ModuleType("wandb")

    def run(arguments):
        calls.append(arguments)
        return types.SimpleNamespace(
            define_metric=lambda names, step_metric: calls.append((names, step_metric)),
            log=lambda values, step: calls.append((step, values)),
            finish=lambda: calls.append("finished"),
        )

    fake.__spec__, fake.init = importlib.machinery.ModuleSpec("wandb", None), lambda **arguments: run(arguments)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return calls


def events(directory):
    """Of all event files: a length, a checksum, an event, a checksum; again and again."""
    for path in sorted(directory.iterdir()):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            yield Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]


def scalars(directory):
    shown = [(event.step, {v.tag: v.simple_value for v in event.summary.value}) for event in events(directory)]
    return [pair for pair in shown if pair[1]]


def test_many_seeds_become_quartiles_and_one_stays_itself():
    values = np.random.default_rng(0).normal(size=(4, 9))
    values[1, :4] = np.nan
    values[2] = np.nan
    rows = over_seeds(np.full((4, 9), 7), {"episode/return_max": values})
    for (step, row), known in zip(rows, [values[0], values[1, 4:], [], values[3]], strict=True):
        expected = np.quantile(known, [0.5, 0.25, 0.75]) if len(known) else []
        names = [f"episode/return_max{ending}" for ending in ("", "_q25", "_q75")]
        assert step == 7 and [*row] == names[: len(expected)]
        np.testing.assert_allclose([*row.values()], expected)
    assert over_seeds(np.array([[1, 1]]), {"a": np.array([[1.0, 2.0]])}) == [(1, {"a": 1.5})]
    assert over_seeds(np.array([[1], [2]]), {"a": np.array([[1.5], [np.inf]])}) == [(1, {"a": 1.5}), (2, {})]


def test_tensorboard_gets_every_iteration_and_forgets_what_is_made_again(tmp_path):
    spec = SPEC._replace(hyperparams=Hyperparams(), keys=KEYS[:3])
    tracker = TensorBoard(tmp_path, spec)
    tracker.record(0, np.array([[10, 20, 30], [20, 40, 60]]), {"policy/entropy": np.array([[1.0, 2.0, 9.0]] * 2)})
    tracker.close()
    shown = scalars(tmp_path)
    assert shown[-2:] == [(20, {"policy/entropy": 2.0}), (40, {"policy/entropy": 2.0})]
    assert "config/text_summary" in shown[0][1]
    TensorBoard(tmp_path, spec, steps=np.array([10, 20, 90])).close()
    assert [event.step for event in events(tmp_path) if event.HasField("session_log")][-1] in (0, 21)


def test_tensorboard_has_a_folder_for_each_setting(tmp_path):
    tracker = TensorBoard(tmp_path, SPEC)
    tracker.record(0, np.full((1, 4), 32), VALUES)
    tracker.close()
    good, bad = (scalars(tmp_path / f"learning_rate_{rate}")[-1][1] for rate in ("0.001", "0.01"))
    assert good["episode/return_mean"] == 45 and bad["episode/return_mean_q75"] == 45.25


def test_weights_and_biases_goes_on_with_its_run(tmp_path, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    for iteration in (0, 1):
        tracker = WeightsAndBiases(tmp_path, SPEC._replace(hyperparams=Hyperparams(), keys=KEYS[:1]), mode="offline")
        tracker.record(iteration, np.array([[5]]), {"loss/policy": np.array([[0.5]])})
        tracker.close()
    first, steps, logged, end = wandb[:4]
    assert wandb[4] == first and first["resume"] == "allow" and first["config"]["config"]["num_envs"] == 4
    assert (first["mode"], first["project"], first["name"]) == ("offline", "mine", "ppo on Probe")
    assert logged == (0, {"loss/policy": 0.5, "environment_steps": 5}) and wandb[6][0] == 1 and end == "finished"
    assert steps == ("*", "environment_steps")


def test_each_setting_is_a_run_of_weights_and_biases(tmp_path, wandb):
    tracker = WeightsAndBiases(tmp_path, SPEC, mode="offline", group="sweep")
    good, _, bad, _ = wandb
    tracker.record(3, np.full((1, 4), 32), VALUES)
    rates = "learning_rate=0.001", "learning_rate=0.01"
    assert [run["name"] for run in (good, bad)] == [f"ppo on Probe {rate}" for rate in rates]
    assert good["id"] != bad["id"] and good["group"] == bad["group"] == "sweep" and bad["reinit"] == "create_new"
    assert [run["config"]["hyperparams"]["learning_rate"] for run in (good, bad)] == [0.001, 0.01]
    (step, first), (_, second) = wandb[4:]
    assert step == 3 and first["episode/return_mean"] == 45 and second["episode/return_mean_q75"] == 45.25
    wandb.clear()
    named = SPEC._replace(rows=[Setting({"name": each}) for each in "abab"])
    WeightsAndBiases(tmp_path, named, mode="offline", group="sweep")
    assert [run["name"] for run in wandb[::2]] == ["a", "b"], "of a sweep, the names of its settings"


@pytest.mark.parametrize("where, calls", [("record", ["record"]), ("close", ["record", "record", "close"])])
def test_a_tracker_that_fails_is_left_out(where, calls):
    class Failing:
        def record(self, *chunk):
            self.done("record")

        def close(self):
            self.done("close")

        def done(self, step):
            called.append(step)
            if step == where:
                raise BrokenPipeError(32, "Broken pipe")

    called: list[str] = []
    with MetricsLogger(None, SPEC, console=False, trackers=[Failing()]) as logger:
        for iteration in range(2):
            logger.record(Chunk({}, np.full((1, 4), 5), iteration=iteration, seconds=1.0))
    assert called == calls
    assert logger.warnings == ["Failing failed ([Errno 32] Broken pipe); the run goes on without it."]


def test_a_tracker_that_cannot_begin_ends_the_run_before_anything_is_compiled(tmp_path, wandb, monkeypatch):
    monkeypatch.setattr(sys.modules["wandb"], "init", lambda **_: {}["no key"])
    with pytest.raises(ConfigError, match="a tracker cannot begin with KeyError: 'no key'; leave it out, or"):
        Recorder(SPEC, Recording(tmp_path, wandb="online"), False, None, False, None).__enter__()


def test_without_weights_and_biases_it_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="wandb is not installed: pip install wandb"):
        Recording(tmp_path, wandb="offline").check()

"""`recorded_run` as a user calls it: a run that is interrupted and resumed is bitwise the uninterrupted one."""

import dataclasses
import functools
import json
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import Probe, bits
from saved_policies import contents

from grpo_jax import Config, Evaluate, Hyperparams, Recording, load, recorded_run, sweep, with_reference
from grpo_jax.errors import ConfigError
from grpo_jax.policies import MLP
from grpo_jax.recording import figures, recorder
from grpo_jax.recording.metrics_file import read_metrics
from grpo_jax.recording.metrics_logger import MetricsLogger

SIZES = {"num_envs": 4, "num_steps": 8, "num_epochs": 1, "num_minibatches": 1, "network": MLP((4,))}
CONFIG = Config(environment=Probe(), algorithm="ppo", schedule="constant", **SIZES)
HYPERPARAMS = Hyperparams(total_steps=10 * 32.0, learning_rate=jnp.array([1e-2, 1e-3]))
KEYS = jax.random.split(jax.random.key(5), 2)


def recorded(directory, *, hyperparams=HYPERPARAMS, keys=KEYS, resume=False, checkpoint_every=4, **options):
    recording = Recording(directory, checkpoint_every, resume)
    return recorded_run(CONFIG, hyperparams, keys, recording, **{"console": False} | options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an uninterrupted run, and its result."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    return directory, recorded(str(directory))


def same(one, other):
    return all(bits(getattr(one, field)) == bits(getattr(other, field)) for field in ("states", "metrics", "steps"))


def test_an_interrupted_run_goes_on_bitwise(whole, tmp_path, monkeypatch, caplog):
    def interrupt(self, chunk, *arguments):
        write(self, chunk, *arguments)
        if chunk.iteration == 5:
            signal.raise_signal(signal.SIGTERM)

    write = MetricsLogger.record
    with monkeypatch.context() as patched:
        patched.setattr(MetricsLogger, "record", interrupt)
        with pytest.raises(SystemExit) as stopped:
            recorded(tmp_path / "run", resume=True)
    assert stopped.value.code == 128 + signal.SIGTERM and "resume=True" in caplog.text
    (chunk,) = read_metrics(tmp_path / "run").values()
    assert len(chunk.steps) == 6, "nothing is lost"
    stopped_at = load(tmp_path / "run", row="all", config=CONFIG)
    assert (stopped_at.steps == chunk.steps[-1]).all(), "the policies are those of the last chunk"
    assert same(recorded(tmp_path / "run", resume=True), whole[1])
    for path in (path.relative_to(whole[0]) for path in whole[0].glob("policies/*/*")):
        assert (tmp_path / "run" / path).read_bytes() == (whole[0] / path).read_bytes()
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (whole[0] / "metrics.jsonl").read_bytes()


def test_a_finished_run_goes_on_with_a_larger_budget(whole, tmp_path):
    recorded(tmp_path / "run", hyperparams=HYPERPARAMS.replace(total_steps=5 * 32.0))
    assert same(recorded(tmp_path / "run", resume=True), whole[1])
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (whole[0] / "metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_of_large_given_weights_one_checkpoint_is_kept_without_the_reference(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "LARGE", 0)
    config = dataclasses.replace(CONFIG, algorithm=with_reference(CONFIG.algorithm))
    given = {"params": jax.vmap(config.policy.init)(KEYS), "console": False}
    recording = functools.partial(Recording, tmp_path / "run", 2, policies=False)
    recorded_run(config, HYPERPARAMS.replace(total_steps=5 * 32.0), KEYS, recording(), **given)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("*/*")
    kept = json.loads((checkpoint / "run" / "metadata").read_text())
    assert kept["given"] and all(path.startswith("reference_params/") for path in kept["given"])
    longer = recorded_run(config, HYPERPARAMS, KEYS, recording(resume=True), **given)
    whole = recorded_run(config, HYPERPARAMS, KEYS, Recording(tmp_path / "whole", 0), **given)
    assert same(longer, whole)


def test_a_run_that_was_never_saved_begins_anew(whole, tmp_path):
    def fail(progress, chunk):
        if progress.iteration:
            raise KeyError

    with pytest.raises(KeyError):
        recorded(tmp_path / "run", callback=fail)
    assert (tmp_path / "run" / "metrics.jsonl").stat().st_size
    assert same(recorded(tmp_path / "run", resume=True), whole[1])
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (whole[0] / "metrics.jsonl").read_bytes()


def test_a_callback_may_stop_a_recorded_run_before_it_begins(tmp_path):
    stop = {"callback": lambda progress, chunk: progress._replace(stopped=np.array(True))}
    result = recorded(tmp_path / "run", **stop)
    assert len(result.steps) == 0 and result.ended_by.tolist() == ["stopped"] * 2
    assert np.isnan(load(tmp_path / "run", config=CONFIG).score)
    result = recorded(tmp_path / "evaluated", evaluate=Evaluate(4, episodes=3), **stop)
    assert result.evaluations.iterations.tolist() == [0] and result.used.tolist() == [0, 0]
    assert load(tmp_path / "evaluated", config=CONFIG).score == result.evaluations.sampled[0].max()


def test_a_finished_run_is_read_back_and_never_overwritten(whole):
    directory, result = whole
    before = contents(directory)
    with pytest.raises(FileExistsError, match="resume=True"):
        recorded(directory)
    assert contents(directory) == before
    again = recorded(directory, resume=True)
    assert same(again, result) and again.compile_seconds == 0


def test_it_draws_a_learning_curve_for_each_setting(whole, tmp_path, monkeypatch):
    directory, result = whole
    assert (directory / "learning_curves.png").read_bytes().startswith(b"\x89PNG")
    drawn = []
    monkeypatch.setattr(figures, "draw_curves", lambda *arguments, **options: drawn.append(arguments))
    figures.plot_settings(figures.ranked_settings(result, "Probe"), tmp_path / "file.png")
    assert {*drawn[0][0]["Probe"]} == {"learning_rate=0.01", "learning_rate=0.001"}


def test_another_run_is_refused(whole):
    before = contents(whole[0])
    for change in ({"discount": 0.5}, {"total_steps": 160.0}, {"max_episodes": 8.0}):
        ((name, value),) = change.items()
        with pytest.raises(ConfigError, match=f"hyperparams.{name} is {value} here.*only its budget may be larger"):
            recorded(whole[0], resume=True, hyperparams=HYPERPARAMS.replace(**change))
    with pytest.raises(ConfigError, match="env_params is .* here, and None in the checkpoints"):
        recorded(whole[0], resume=True, env_params={"bonus": [0.0, 1.0]})
    assert contents(whole[0]) == before


def test_a_mistake_leaves_no_folder(tmp_path):
    for options, message in (
        ({"checkpoint_every": -1}, "checkpoint_every=-1"),
        ({"checkpoint_every": 0, "resume": True}, "needs checkpoints, and checkpoint_every=0 makes none"),
        ({"hyperparams": Hyperparams(total_steps=3.0)}, "does not allow one iteration"),
        ({"evaluations": 3}, "unknown argument 'evaluations'.*evaluate"),
        ({"keys": [*KEYS]}, "keys must be one key for each row"),
        *(({"keys": wrong}, "for each row|for each key") for wrong in (KEYS[0], KEYS[:, None], KEYS[:0])),
    ):
        with pytest.raises(ConfigError, match=message):
            recorded(tmp_path / "run", **options)
    with pytest.raises(ConfigError, match=r"checkpoint_every is a field of the recording: Recording\(folder"):
        sweep(CONFIG, {"discount": [0.9, 0.99]}, out=tmp_path / "out", checkpoint_every=3)
    with pytest.raises(ConfigError, match="None is no path.*such as runs/mine"):
        recorded_run(CONFIG, HYPERPARAMS, KEYS, None)
    assert list(tmp_path.iterdir()) == []

"""Sweeps: what the flags mean, what fits into memory, and that each row is the run it would be alone."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from grpo_jax import Hyperparams
from grpo_jax.algorithms import name_of
from grpo_jax.commands import sweep, train
from grpo_jax.commands.harness.command import join_processes, mesh_sizes
from grpo_jax.commands.harness.study import RecordingArguments
from grpo_jax.errors import ConfigError
from grpo_jax.recording.checkpoint import Checkpoints
from grpo_jax.recording.config_file import as_fields
from grpo_jax.runs.run_spec import Setting
from grpo_jax.sweeps.study import check_plans
from grpo_jax.sweeps.sweep import make_programs

SMALL = ["--environment", "Catch-bsuite", "--algorithm", "ppo", "--num-envs", "4", "--num-steps", "16"]
SMALL += ["--num-minibatches", "2", "--hidden-sizes", "8", "--total-steps", "200"]


def make_grid(flags, samples=None, seed=0):
    return sweep.grid_of_flags(flags, jax.random.split(jax.random.key(0), 2), samples, seed)


def test_traced_and_static_axes_span_a_grid():
    flags = [*SMALL, "--learning-rate", "1e-3", "1e-2", "--num-epochs=1", "--num-minibatches", "2", "4"]
    flags += ["--hidden-sizes", "8", "4"]  # has several values by nature, and is no axis
    found = make_grid(flags)
    values = [(plan.config.num_minibatches, plan.hyperparams.learning_rate) for plan in found]
    assert values == [(2, 1e-3), (2, 1e-2), (4, 1e-3), (4, 1e-2)]
    assert [plan.label for plan in found] == [{"num_minibatches": n, "learning_rate": rate} for n, rate in values]
    assert {(plan.config.num_epochs, plan.config.network.hidden_sizes) for plan in found} == {(1, (8, 4))}
    assert str(found[3].setting) == "num_minibatches=4, learning_rate=0.01"
    # What is not said is as grpo-jax train has it: tuned for the environment and the algorithm.
    assert found[0].config.env.max_steps == 9 and found[0].hyperparams.entropy_coef == 0.01


def test_a_budget_of_the_flags_replaces_the_other_kind_of_a_file(tmp_path):
    file = tmp_path / "fields.json"

    def budget(fields, *flags):
        file.write_text(json.dumps(fields))
        hyperparams = train.parse(train.RunFlags, ["--config", str(file), *flags]).hyperparams
        return hyperparams.total_steps, hyperparams.num_iterations

    assert budget({"total_steps": 9e4}, "--num-iterations", "7") == (Hyperparams.total_steps, 7)
    assert budget({"num_iterations": 7}, "--total-steps", "9e4") == (9e4, None)
    assert budget({"algorithm": "auto", "num_iterations": 7}) == (Hyperparams.total_steps, 7)
    plans = make_grid(["--config", str(file), "--total-steps", "1e6", "1e5"])
    assert [name_of(plan.config.algorithm) for plan in plans] == ["ppo", "ppo"]
    assert [plan.hyperparams.num_iterations for plan in plans] == [None, None]
    assert [plan.hyperparams.total_steps for plan in plans] == [1e6, 1e5]


def test_samples_are_drawn_log_uniformly():
    found = make_grid([*SMALL, "--learning-rate", "1e-5", "1e-1", "--clip-high", "0.1", "0.4"], samples=200, seed=1)
    rates, clips = np.array([[*plan.label.values()] for plan in found]).T
    assert len(found) == 200 and 1e-5 <= rates.min() < 1e-4 < 1e-2 < rates.max() <= 1e-1
    assert abs(np.log10(rates).mean() + 3) < 0.3 and 0.1 <= clips.min() < clips.max() <= 0.4
    assert all(plan.hyperparams.clip_high == clip for plan, clip in zip(found, clips, strict=True))


def test_labels_are_exact_and_say_no_more_than_they_must():
    found = make_grid([*SMALL, "--discount", "0.9999999", "1", "0.123456789", "1e-3"])
    values = [0.9999999, 1, 0.123456789, 0.001]
    assert [str(plan.setting) for plan in found] == [f"discount={value}" for value in values]
    assert [plan.label["discount"] for plan in found] == values


MISTAKES = [
    (["--learning-rate", "1e-3", "0.001"], None, "two runs would have one folder: learning_rate=0.001 and"),
    (["--algorithm", "grpo", "GRPO"], None, "two runs would have one folder: algorithm=grpo and algorithm=GRPO"),
    (["--environment", "CartPole-v1", "Catch-bsuite"], None, "use one --environment"),
    (["1e-3", "--learning-rate", "1e-3"], None, "'1e-3' follows no flag"),
    (["--entropy-coef", "0", "1e-2"], 4, "no range to draw from.*0 < low < high"),
    (["--num-envs", "8", "16"], 4, "a range to draw from, such as learning_rate"),
]


@pytest.mark.parametrize("flags, samples, message", MISTAKES)
def test_mistakes_in_the_flags_are_reported(flags, samples, message):
    with pytest.raises(ValueError, match=message):
        check_plans(make_grid(flags, samples))


def test_rows_are_split_as_asked():
    found = make_grid([*SMALL, "--learning-rate", "1", "2", "3", "4", "5"])  # of two seeds each
    for rows_at_once, rates in ((None, [[1, 2, 3, 4, 5]]), (5, [[1, 4], [2, 5], [3]]), (2, [[1], [2], [3], [4], [5]])):
        programs = make_programs(found, rows_at_once)
        split = [[setting.values["learning_rate"] for setting in program.settings.rows] for program in programs]
        assert split == rates and all(len(program.keys) == 2 * len(program.settings.rows) for program in programs)
    with pytest.raises(ConfigError, match="rows_at_once=1 is less than the 2 seeds of one setting"):
        make_programs(found, 1)


# --- files of fields -------------------------------------------------------------------------------------------------


def test_a_file_of_fields_is_read_back(tmp_path):
    base = train.parse(train.RunFlags, [*SMALL, "--hidden-sizes", "8", "4", "--learning-rate", "0.0123"])
    path = tmp_path / "best.json"
    path.write_text(json.dumps(as_fields(base.config, base.hyperparams)))
    again = train.parse(train.RunFlags, ["--config", str(path)])
    assert again.config == base.config and again.hyperparams == base.hyperparams
    other = train.parse(train.RunFlags, [f"--config={path}", "--clip_high", "0.3", "--num-epochs", "1"])
    assert other.hyperparams == base.hyperparams.replace(clip_high=0.3) and other.config.num_epochs == 1


INVALID = {
    '{"learning_rat": 1e-3}': "'learning_rat' is no field .*did you mean 'learning_rate'",
    "[1]": "in JSON it must be dict",
    "{": "cannot be read",
    '{"num_envs": "8"}': 'num_envs="8" must be int',
    '{"network": {"name": "mlp", "shared_critic": "no"}}': 'shared_critic="no" must be bool',
    '{"total_steps": null}': "total_steps=null must be float",
}


def test_an_invalid_file_is_reported(tmp_path):
    path = tmp_path / "best.json"
    with pytest.raises(ValueError, match="cannot be read: .*No such file"):
        train.parse(train.RunFlags, ["--config", str(path)])
    for text, message in INVALID.items():
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            train.parse(train.RunFlags, ["--config", str(path)])


# --- devices ---------------------------------------------------------------------------------------------------------


def test_a_mesh_from_flags():
    assert mesh_sizes(("seeds=2", "envs=4"), "--mesh") == {"seeds": 2, "envs": 4}
    for sizes in (("rows=2",), ("seeds",), ("seeds=two",), ("envs=0",), ("seeds=1", "seeds=2")):
        with pytest.raises(ValueError, match="is no layout of devices; use seeds=4"):
            mesh_sizes(sizes, "--mesh")


def test_a_coordinator_that_cannot_be_is_reported(monkeypatch):
    def initialize():
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    wrong = {
        "--coordinator host:1": "is incomplete: use all three",
        "--coordinator=host:1 --num-processes=2 --process-id=2": "is incomplete: use all three",
        "--coordinator auto": "--coordinator auto finds no scheduler.*use host:port",
        "--coordinator host --num-processes 2 --process-id 0": "--coordinator host is no address; write host:port",
    }
    for flags, message in wrong.items():
        with pytest.raises(ConfigError, match=message):
            join_processes([*flags.split(), "--learning-rate", "1e-3", "1e-2"])


# --- end to end ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sweep_end_to_end_in_one_program_and_in_parts(tmp_path, capsys):
    flags = [*SMALL, "--learning-rate", "1e-3", "1e-2", "--clip-high", "0.1", "0.3"]
    sweep.main(sweep.Arguments(num_seeds=3, out=tmp_path / "whole"), flags)
    sweep.main(sweep.Arguments(num_seeds=3, rows_at_once=10, out=tmp_path / "parts"), flags)
    runs = {}
    for name in ("whole", "parts"):
        assert {"metrics.jsonl", "summary.json"} <= {path.name for path in (tmp_path / name).iterdir()}
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        runs[name] = {str(Setting(run["values"])): run["final_return"]["per_seed"] for run in summary["runs"]}
    assert len(runs["whole"]) == 4 and runs["whole"] == runs["parts"]
    best = train.parse(train.RunFlags, ["--config", str(tmp_path / "whole" / "best.json")])
    assert f"learning_rate={best.hyperparams.learning_rate}, clip_high={best.hyperparams.clip_high}" in runs["whole"]
    printed = capsys.readouterr().out
    assert "program 1: ppo, 4 × 3 seeds" in printed and "program 2: " in printed
    assert (tmp_path / "whole" / "sweep.png").exists()


@pytest.mark.slow
def test_a_sweep_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    flags = [*SMALL, "--total-steps", "640", "--learning-rate", "1e-3", "1e-2", "--num-epochs", "1", "2"]
    arguments = sweep.Arguments(num_seeds=3, recording=RecordingArguments(checkpoint_every=1), out=tmp_path / "whole")
    sweep.main(arguments, flags)

    class Killed(Exception):
        pass

    save, saves = Checkpoints.save, []

    def killed(self, progress):
        save(self, progress)
        saves.append(progress.iteration)
        if len(saves) == 15:  # in the second of the two programs
            raise Killed

    resumed = dataclasses.replace(arguments, out=tmp_path / "resumed")
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "save", killed)
        with pytest.raises(Killed):
            sweep.main(resumed, flags)
    assert 0 < saves[-1] < 10
    resumed = dataclasses.replace(resumed, recording=RecordingArguments(checkpoint_every=1, resume=True))
    with pytest.raises(ValueError, match="which is none of"):
        sweep.main(resumed, [*flags[:-2], "3"])
    sweep.main(resumed, flags)
    for name in ("metrics.jsonl", "programs/metrics.jsonl"):
        assert (tmp_path / "whole" / name).read_text() == (tmp_path / "resumed" / name).read_text()
    whole, again = (json.loads((tmp_path / out / "summary.json").read_text())["runs"] for out in ("whole", "resumed"))
    assert [run["final_return"] for run in whole] == [run["final_return"] for run in again]

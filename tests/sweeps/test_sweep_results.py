"""A sweep in Python: settings and seeds kept apart in its ranking, curves, tables, pictures and policies."""

import dataclasses
import sys

import numpy as np
import pytest
from probes import bits

import grpo_jax
from grpo_jax import Config, Hyperparams, Recording, plot, run, sweep
from grpo_jax.commands import sweep as command
from grpo_jax.commands.harness.flags import RunFlags, parse
from grpo_jax.errors import ConfigError
from grpo_jax.recording.figures import differing
from grpo_jax.recording.statistics import describe_seeds
from grpo_jax.runs.result import RunResult
from grpo_jax.runs.run_spec import Setting, settings_of
from grpo_jax.sweeps import SweepResult
from grpo_jax.sweeps.pictures import plot_axes
from grpo_jax.sweeps.runs import Run, run_keys

FLAGS = ["--environment", "Catch-bsuite", "--algorithm", "ppo", "--num-envs", "4", "--num-steps", "16"]
FLAGS += ["--num-minibatches", "2", "--hidden-sizes", "8", "--total-steps", "200"]
BASE = parse(RunFlags, FLAGS)
RATES = [1e-3, 1e-2]
RETURN = "episode/return_mean"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("sweep") / "here"
    values, config = {"learning_rate": RATES, "clip_high": 0.3}, dataclasses.replace(BASE.config)
    return sweep(config, values, num_seeds=3, hyperparams=BASE.hyperparams, out=out, console=False)


def finished(values, final_returns, metrics=None):
    """A run of one iteration."""
    num_seeds = len(final_returns)
    metrics = metrics or {RETURN: np.array([final_returns]), "episode/count": np.ones((1, num_seeds))}
    result = RunResult(None, metrics, np.full((1, num_seeds), 64), 1.0, 1.0, None, None, None)
    setting, scores = Setting(values, "Catch-bsuite"), np.array(final_returns, float)
    return Run(setting, BASE.config, Hyperparams(), result, scores, 2.0, 1.0)


def made(axes, finals):
    """The result of a sweep with these final returns, by the point."""
    runs = [finished(dict(zip(axes, point, strict=True)), each) for point, each in finals.items()]
    return SweepResult("runs/made", runs)


def test_each_setting_has_its_result(found):
    setting = found.settings[1]
    assert setting.label == "learning_rate=0.01" and setting.hyperparams.clip_high == 0.3
    assert found.by_setting[setting.setting].metrics[RETURN].shape == (3, 3)
    table = pytest.importorskip("pandas") and found.to_dataframe()
    assert [*table.columns[:4]] == ["learning_rate", "seed", "iteration", "environment_steps"] and len(table) == 18


def test_a_sweep_may_keep_no_policies(found, tmp_path):
    recording, config = Recording(tmp_path, policies=False, checkpoint_every=0), found.settings[0].config
    options = {"num_seeds": 3, "hyperparams": BASE.hyperparams, "console": False}
    assert len(sweep(config, {"learning_rate": RATES, "clip_high": 0.3}, out=recording, **options).ranking) == 2


@pytest.mark.slow
def test_each_setting_is_the_run_it_would_be_alone(found):
    alone = BASE.hyperparams.replace(learning_rate=1e-2, clip_high=0.3)
    result = run(dataclasses.replace(BASE.config), alone, run_keys(0, 3)[0])
    np.testing.assert_array_equal(found.settings[1].result.steps, result.steps)
    assert [*result.settings.rows] == [Setting()]
    for name in (RETURN, "policy/entropy", "loss/value"):
        np.testing.assert_allclose(found.settings[1].result.metrics[name], result.metrics[name], rtol=1e-4, atol=1e-5)


def test_settings_are_ranked_by_their_means():
    result = made(("discount",), {(0.9,): [0, 0, 0, 100], (1.0,): [10, 10, 10, 10], (0.5,): [np.nan] * 4})
    ranking = result.ranking
    assert [setting.values["discount"] for setting in ranking] == [1.0, 0.9, 0.5], "not by the luckiest seed"
    assert ranking[1].mean == 0 and ranking[1].interval == (0, 100) and ranking[0].interval[0] == 10
    lines = repr(result).splitlines()
    assert "IQM of 4 seeds" in lines[0] and "fewer than 6" in lines[1] and lines[2] == "  1  discount=1    10 [10, 10]"
    assert repr(ranking[1]).startswith("discount=0.9 on Catch-bsuite: final return 0 [0, 100], IQM of 4 seeds")
    table = pytest.importorskip("pandas") and result.ranking_dataframe()
    assert table.iloc[1].tolist() == [0.9, 0, 0, 100] and [*table.columns[1:]] == ["final_return", "low", "high"]


def test_policies_are_those_of_the_best_setting(found):
    best, policies = found.ranking[0], found.load()
    assert len(policies) == 3 and np.all(policies.hyperparams.learning_rate == np.float32(best.values["learning_rate"]))
    assert found.load(seed=1).row == 1 and found.load({"learning_rate": 0.001}).hyperparams.learning_rate[0] == 1e-3
    policy = grpo_jax.load(found.out)
    assert policy.name == f"{best.label} on Catch-bsuite" and policy.score == policies.score.max()
    with pytest.raises(ConfigError, match="no setting 'learning_rate=0.1': did you mean 'learning_rate=0.01'"):
        found.load("learning_rate=0.1")


def test_results_of_runs_keep_settings_apart_too():
    metrics = {"environment/steps": np.array([[64, 64, 64], [0, 64, 0]]), "loss/policy": np.arange(6.0).reshape(2, 3)}
    settings = settings_of({"discount": np.array([0.5, 1.0, 0.5])}, 3)
    steps = np.array([[64, 64, 64], [64, 128, 64]])
    result = RunResult(None, metrics, steps, 1.0, 1.0, None, None, None, settings)
    losses = [part.metrics["loss/policy"].tolist() for part in result.by_setting.values()]
    assert losses == [[[0, 2], [3, 5]], [[1], [4]]]
    table = pytest.importorskip("pandas") and result.to_dataframe()
    lines = zip(table.discount, table.seed, table.iteration, table.environment_steps, table["loss/policy"], strict=True)
    expected = [(0.5, 0, 0, 64, 0), (0.5, 1, 0, 64, 2), (1.0, 0, 0, 64, 1), (1.0, 0, 1, 128, 4)]
    assert [*lines] == expected, "no line after the end of a seed"


COMMANDED = [*FLAGS, "--clip-high", "0.3", "--learning-rate", *map(str, RATES)]


def test_the_command_asks_for_the_same_rows(found, tmp_path, monkeypatch, capsys):
    """With the same settings and keys, which is all that a folder depends on; and says what was found."""

    def ask(plans, recording=None, evaluation_keys=None, **options):
        rows = [(plan.label, plan.config, plan.hyperparams, bits(plan.keys)) for plan in plans]
        asked.append((rows, bits(evaluation_keys)))
        return found

    asked = []
    for name in ("grpo_jax.sweeps.sweep", "grpo_jax.commands.sweep"):
        monkeypatch.setattr(sys.modules[name], "train_grid", ask)
    values, options = {"learning_rate": RATES, "clip_high": 0.3}, {"hyperparams": BASE.hyperparams, "num_seeds": 3}
    sweep(dataclasses.replace(BASE.config), values, out=tmp_path / "here", **options)
    command.main(command.Arguments(num_seeds=3, out=tmp_path / "shell"), COMMANDED)
    assert asked[0] == asked[1]
    assert f"--config {found.out / 'best.json'}" in capsys.readouterr().out.replace("\n", "")


def test_pictures_are_drawn(found, tmp_path):
    plot(found, tmp_path / "curves.png", "policy/entropy")
    plot({"one": found.settings[0].result, "other": found.settings[1].result}, tmp_path / "two.png")
    finals = {
        (a, b, i): [a, i, np.nan if b == "relu" else 2.0] for a in (0.1, 0.2) for b in ("relu", "tanh") for i in (1, 20)
    }
    plot_axes(made(("discount", "activation", "num_epochs"), finals), tmp_path / "panels.png")
    finals = {(a, i): [np.nan, np.nan] if i == 2 else [3.0, i] for a in ("relu", "tanh") for i in (2, 1, 4)}
    plot_axes(made(("activation", "num_epochs"), finals), tmp_path / "heat.png")
    many = plot(made(("discount",), {(i,): [float(i)] for i in range(12)}))
    labels = many.axes[0].get_legend_handles_labels()[1]
    assert labels == [f"discount={i}" for i in range(11, 1, -1)], "the best ten"
    assert "the best 10 of 12 settings" in many.get_suptitle() and "1 seed: too few" in many.get_suptitle()
    pictures = [path.read_bytes() for path in tmp_path.iterdir()]
    assert {picture[:4] for picture in [*pictures, many._repr_png_()]} == {b"\x89PNG"}
    with pytest.raises(ConfigError, match="no metric 'return'"):
        plot(found, metric="return")


def test_names_are_of_what_differs_only():
    settings = [Setting({"algorithm": "ppo", "discount": value}) for value in (1.0, 0.9)]
    assert differing(settings) == ["discount=1", "discount=0.9"]
    assert differing(settings[:1]) == ["algorithm=ppo, discount=1"]
    assert describe_seeds(6) == "IQM of 6 seeds, 95% interval"


CONFIG = BASE.config
OTHER = dataclasses.replace(CONFIG, num_epochs=9)
MISTAKES = {
    "nothing": (CONFIG, {"learning_rate": [1e-3]}, "nothing to sweep"),
    "an unknown field": (CONFIG, {"learning_rat": [1e-3, 1e-2]}, "'learning_rat' is no field .*'learning_rate'"),
    "a field of a class": (CONFIG, {"sapo_tau_positive": [1, 2]}, r"_replace\(hyperparams="),
    "a word": (CONFIG, {"learning_rate": [1e-3, "fast"]}, "learning_rate 0.001 fast: not all of them are numbers"),
    "the same": (CONFIG, {"discount": [1, 1.0]}, "one folder: discount=1 and discount=1"),
    "no values": (CONFIG, {"discount": []}, "discount has no values"),
    "algorithms": (CONFIG, {"algorithm": ["grpo", CONFIG.algorithm]}, r"for each: sweep\({name: Config\(algorithm="),
    "a list of configs": ([CONFIG], {"discount": [0.9, 1]}, "or several by their names"),
    "a list of settings": (CONFIG, [Hyperparams()], r"values=\[Hyperparams\(\)\] must be lists by name"),
    "environments": ({"a": CONFIG, "b": Config("CartPole-v1")}, {}, "different environments cannot be ranked"),
    "one folder": ({"a/b": CONFIG, "A b": OTHER}, {"discount": [0.9, 1]}, "one folder: a/b, .* and A b, "),
    "a size": (CONFIG, {"num_minibatches": [2, 7]}, "num_minibatches"),
}


@pytest.mark.parametrize("configs, values, message", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_reported_before_a_folder_is_made(configs, values, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        sweep(configs, values, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_several_configs_and_their_fields_are_axes():
    from grpo_jax.sweeps.grid import make_bases, make_grid

    configs = {"small": CONFIG, "large on b, c=1": parse(RunFlags, [*FLAGS, "--hidden-sizes", "16"]).config}
    values = {"num_epochs": [1, 2], "learning_rate": np.float32([1e-3, 3e-4]), "discount": (0.5,)}
    plans = make_grid(*make_bases(configs, values, Hyperparams(), run_keys(0, 2)[0]))
    assert len(plans) == 8 and plans[-1].label == {"config": "large on b, c=1", "num_epochs": 2, "learning_rate": 3e-4}
    assert str(plans[-1].setting) == "large on b, c=1, num_epochs=2, learning_rate=0.0003"
    assert plans[-1].config.num_epochs == 2 and plans[-1].hyperparams.discount == 0.5

"""A sweep made by hand: rows that differ in hyperparameters are settings, those of one setting are its seeds."""

import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import Probe
from rich.console import Console
from saved_policies import save_policies

import grpo_jax
from grpo_jax import Config, Hyperparams
from grpo_jax.commands import plot
from grpo_jax.policies import MLP
from grpo_jax.recording.metrics_file import read_metrics, read_settings
from grpo_jax.recording.metrics_logger import MetricsLogger
from grpo_jax.runs.progress import Chunk
from grpo_jax.runs.run_spec import RunSpec, Setting, as_value, format_value, setting_columns, settings_of

SIZES = {"num_envs": 4, "num_steps": 8, "num_epochs": 1, "num_minibatches": 1, "network": MLP((4,))}
CONFIG = Config(environment=Probe(), algorithm="ppo", **SIZES)
# Two settings of two seeds each; the last row is the luckiest, and its setting the worse one.
RATES = Hyperparams(learning_rate=jnp.array([1e-3, 1e-2, 1e-3, 1e-2]), kl_limit=jnp.array([0.05, np.inf, 0.05, np.inf]))
RETURNS = np.array([40.0, 1.0, 50.0, 60.0])
GOOD = Setting({"learning_rate": 0.001, "kl_limit": 0.05})
BAD = Setting({"learning_rate": 0.01, "kl_limit": np.inf})
SETTINGS = settings_of(setting_columns(RATES, None, {}), 4)


def chunk(returns=RETURNS):
    metrics = {"episode/return_mean": returns[None], "episode/count": np.ones((1, 4)), "environment/steps": [[32] * 4]}
    return Chunk({name: np.array(values) for name, values in metrics.items()}, np.full((1, 4), 32), 0, 1.0)


def make_logger(directory, **options):
    spec = RunSpec("ppo", CONFIG, RATES.replace(total_steps=32.0), jax.random.split(jax.random.key(0), 4))
    return MetricsLogger(directory, spec, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """As a run leaves it."""
    directory = tmp_path_factory.mktemp("sweep")
    with make_logger(directory, console=False) as logger:
        logger.record(chunk())
    return directory


def test_rows_that_differ_are_settings_in_their_order_and_rows_that_are_alike_seeds_of_one():
    columns = {"learning_rate": jnp.full(3, 1e-3), "discount": np.array([1, 1, 0.99999999]), "warmup": None}
    alike = settings_of(columns, 3)
    assert {setting: rows.tolist() for setting, rows in alike.rows.items()} == {Setting(): [0, 1, 2]}, "in float32"
    assert alike.word == "seeds" and as_value(np.float32(3e-4)) == 3e-4 and format_value(0.123456789) == "0.123456789"
    assert {label: rows.tolist() for label, rows in SETTINGS.rows.items()} == {GOOD: [0, 2], BAD: [1, 3]}
    assert str(GOOD) == "learning_rate=0.001, kl_limit=0.05"
    keys = jax.random.split(jax.random.key(0), 2)
    plan = RunSpec("ppo", CONFIG, Hyperparams(), keys, env_params={"bonus": [0.5, 1.0]})
    assert [*map(str, plan.settings.rows)] == ["bonus=0.5", "bonus=1"]
    groups = settings_of({"bonus": np.arange(6.0).reshape(2, 3)}, 2)
    assert [*groups.rows] == [Setting()], "values for the groups of a row are drawn, not chosen"


def test_parameters_that_are_arrays_differ_by_their_entries():
    def labels(goal):
        columns = setting_columns(Hyperparams(), {"goal": goal}, {"goal": np.zeros(2)})
        return [*map(str, settings_of(columns, 2).rows)]

    assert labels([[0.0, 1.0], [0.0, 2.0]]) == ["goal[1]=1", "goal[1]=2"]
    assert labels([0.0, 1.0]) == [""], "one goal for both rows"
    assert labels(np.arange(8.0).reshape(2, 2, 2)) == [""], "goals for the groups of a row"


def test_the_best_row_is_a_seed_of_the_best_setting():
    assert SETTINGS.ranked(RETURNS) == [GOOD, BAD] and SETTINGS.best_row(RETURNS) == 2
    assert SETTINGS.best_row(np.array([40.0, 1.0, np.nan, 60.0])) == 3, "of a seed nothing is known"
    assert settings_of({}, 4).best_row(RETURNS) == 3


def test_the_policy_of_the_best_setting_is_loaded(tmp_path):
    save_policies(tmp_path, CONFIG, scores=RETURNS, hyperparams=RATES)
    assert grpo_jax.load(tmp_path, config=CONFIG).row == 2
    assert grpo_jax.load(tmp_path, config=CONFIG, row=3).hyperparams.learning_rate == jnp.float32(1e-2)
    policies = grpo_jax.load(tmp_path, config=CONFIG, row="all")
    assert policies.settings.rows[BAD].tolist() == [1, 3]


def test_the_record_says_which_row_had_which_settings(folder):
    (line,) = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    assert line["setting/learning_rate"] == [0.001, 0.01, 0.001, 0.01]
    assert line["setting/kl_limit"] == [0.05, "inf", 0.05, "inf"] and "setting/discount" not in line
    (found,) = read_settings(folder).values()
    assert {label: rows.tolist() for label, rows in found.rows.items()} == {GOOD: [0, 2], BAD: [1, 3]}
    (metrics,) = read_metrics(folder).values()
    assert not any("setting" in name for name in metrics.metrics), "a resumed run has the metrics of a whole one"


def test_the_progress_shows_the_best_setting():
    console = Console(file=io.StringIO(), width=120)
    with make_logger(None, console=console) as logger:
        logger.record(chunk())
    shown = console.file.getvalue()
    assert f"return 45 (40..50) of {GOOD}, the best of 2 settings" in shown and "60" not in shown.replace("0:0", "")


def test_plots_and_tables_have_a_run_for_each_setting(folder, tmp_path, capsys):
    runs = plot.read_runs(folder)
    expected = [(f"ppo: {GOOD}", [[40.0, 50.0]]), (f"ppo: {BAD}", [[1.0, 60.0]])]
    assert [(run.label, run.chunk.metrics["episode/return_mean"].tolist()) for run in runs] == expected
    plot.main(plot.Arguments(runs=(folder,), out=tmp_path / "plot"))
    printed = capsys.readouterr().out
    assert "45 [40, 50]" in printed and "30.5 [1, 60]" in printed

"""Comparisons on many environments: what stays of earlier runs, and the tables."""

import dataclasses
import json

import numpy as np
import pytest

from experiments import gymnax_suite, suites
from experiments.harness import suite_study
from experiments.harness.suite_study import run_suite, write_comparison
from experiments.harness.summaries import read_results
from grpo_jax import Hyperparams
from grpo_jax.commands.harness.settings import make_plan
from grpo_jax.errors import ConfigError
from grpo_jax.policies import MLP
from grpo_jax.sweeps.runs import Run
from grpo_jax.training.progress import RunResult

HEADER, CELLS, CATCH = gymnax_suite.HEADER, gymnax_suite.cells, "Catch-bsuite"


class Trained:
    """A study whose runs are over at once."""

    def __init__(self, name, plans, arguments, *, score):
        self.plans, self.num_seeds, self.runs = plans, arguments.num_seeds, []

    def run_all(self):
        metrics = {name: np.ones((2, self.num_seeds)) for name in ("episode/return_mean", "episode/count")}
        steps = np.array([[64], [128]]) * np.ones(self.num_seeds)
        result = RunResult(None, metrics, steps, 1.0, 1.0, None, None, None)
        final = np.ones(self.num_seeds)
        self.runs = [Run(plan.label, plan.config, plan.hyperparams, result, final, 1.0, 1.0) for plan in self.plans]


def plans_of(arguments, environment):
    sizes = {"num_envs": 4, "num_minibatches": 2, "network": MLP((4,)), "total_steps": 128}
    methods = {"PPO": ("ppo", 16), "LSTD": ("lstd_gae", 16), "GRPO": ("grpo", None)}
    return [
        make_plan(environment, name, arguments.training_keys, label=label, num_steps=num_steps, **sizes)
        for label, (name, num_steps) in methods.items()
    ]


def run_catch(arguments):
    run_suite("gymnax_suite", arguments, [CATCH], lambda name: plans_of(arguments, name), HEADER, CELLS)


def suite_entry(ppo, grpo, algorithm="grpo", labels=("PPO", "GRPO")):
    curve = {"steps": [10, 20], "mean": [0.0, 1.0], "low": [0.0, 0.5], "high": [0.0, 1.5]}
    runs = dict(zip(labels, ((ppo, "ppo"), (grpo, algorithm)), strict=True))
    return {"steps": 1000, "random": 0.25, "num_seeds": 5, "hardware": "", "runs": {
        label: {"algorithm": name, "iqm": value, "ci95": [value - 1, value + 1], "core_seconds": 7.0,
                "steps_per_second": 2000.0, "curve": curve}
        for label, (value, name) in runs.items()
    }}  # fmt: skip


def test_the_suites_table_says_which_goals_are_missed(tmp_path):
    results = {
        "Pendulum-v1": suite_entry(-240.0, -500.0, "grpo_return_to_go"),
        "Acrobot-v1": suite_entry(-95.0, -91.0),
        "Swimmer-misc": suite_entry(3.0, 4.0),
    }
    write_comparison(results, tmp_path, gymnax_suite.HEADER, gymnax_suite.cells)
    assert json.loads((tmp_path / "summary.json").read_text()) == results
    lines = [line.strip("| ").split(" | ") for line in (tmp_path / "table.md").read_text().splitlines()[2:]]
    assert lines[0][2:] == [
        "-240 [-241, -239]",
        "",
        "-500 [-501, -499] `grpo_return_to_go`",
        "0.25",
        "-130",
        "-250",
        "7 s",
    ]
    assert [line[-2] for line in lines] == ["-250", "-90 (missed)", ""]
    assert (tmp_path / "learning_curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_method_of_a_suite_runs_beside_the_results_of_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(suite_study, "Study", Trained)
    earlier = suite_entry(1.0, 2.0) | {"steps": 128, "num_seeds": 2}
    write_comparison({CATCH: earlier}, tmp_path, HEADER, CELLS)
    arguments = gymnax_suite.Arguments(methods=("LSTD",), num_seeds=2, out=tmp_path)
    run_catch(arguments)
    entry = read_results(tmp_path)[CATCH]
    assert list(entry["runs"]) == ["PPO", "GRPO", "LSTD"] and entry["random"] == 0.25
    assert entry["runs"]["PPO"] == earlier["runs"]["PPO"] and entry["runs"]["LSTD"]["algorithm"] == "lstd_gae"
    run_catch(arguments)
    assert read_results(tmp_path)[CATCH] == entry, "the folder has all of it"
    for changed, message in (
        ({"num_seeds": 3}, "128 steps and 2 seeds .* of 128 and 3"),
        ({"methods": ("LSTM",)}, "unknown method 'LSTM'.*LSTD"),
    ):
        with pytest.raises(ConfigError, match=message):
            run_catch(dataclasses.replace(arguments, environments=(CATCH,), **changed))
    with pytest.raises(ConfigError, match="unknown method 'LSTM'"):  # nor are environments left out for it
        run_catch(dataclasses.replace(arguments, methods=("LSTM",)))


def test_methods_of_a_suite_one_after_another_in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(suite_study, "Study", Trained)
    for method, whole_episodes in (("LSTD", False), ("GRPO", True)):
        run_catch(gymnax_suite.Arguments(methods=(method,), num_seeds=2, out=tmp_path))
        row = (tmp_path / "table.md").read_text().splitlines()[2].split(" | ")
        assert bool(row[HEADER.index("random") + 1]) == whole_episodes, "only those show what a random policy earns"
    assert list(read_results(tmp_path)[CATCH]["runs"]) == ["LSTD", "GRPO"]


def test_the_table_of_other_suites_has_published_figures(tmp_path):
    entry = suite_entry(800.0, 300.0, "kernel_gae", labels=("PPO", "critic-free"))
    write_comparison({"brax:hopper": entry}, tmp_path, suites.HEADER, suites.cells)
    assert (tmp_path / "table.md").read_text().splitlines()[2] == (
        "| brax:hopper | 1,000 | 800 [799, 801] | 300 [299, 301] `kernel_gae` "
        f"| {suites.SUITE['brax:hopper'].published} | 2,000 | 7 s |"
    )


def test_a_comparison_in_which_nothing_is_installed_is_an_error(tmp_path, capsys):
    def plan(environment):
        raise ConfigError(f"{environment} needs a package")

    with pytest.raises(ConfigError, match="none of the environments can be made"):
        run_suite("suites", suites.Arguments(out=tmp_path / "new"), ["some:task"], plan, suites.HEADER, suites.cells)
    assert capsys.readouterr().out == "left out: some:task needs a package\n"


@pytest.mark.slow
def test_the_suite_adds_an_environment_to_its_results(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for environment in ("SimpleBandit-bsuite", "Catch-bsuite"):
        arguments = gymnax_suite.Arguments(
            environments=(environment,), num_seeds=2, steps_factor=0.1, out=tmp_path / "out"
        )
        gymnax_suite.main(arguments)
    results = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert list(results) == ["Catch-bsuite", "SimpleBandit-bsuite"]  # in the table's order
    assert -1.0 < results["Catch-bsuite"]["random"] < -0.5
    assert results["SimpleBandit-bsuite"]["runs"]["PPO"]["algorithm"] == "ppo"
    assert "Catch-bsuite" in capsys.readouterr().out


def test_an_environment_without_settings_has_the_default_budget(tmp_path):
    plans = suites.plans(suites.Arguments(steps_factor=0.5, out=tmp_path), "Catch-bsuite")
    assert [plan.hyperparams.total_steps for plan in plans] == [0.5 * Hyperparams().total_steps] * 2

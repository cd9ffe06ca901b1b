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


def run_catch(arguments):
    sizes = {"num_envs": 4, "num_minibatches": 2, "network": MLP((4,)), "total_steps": 128}

    def plans(environment):
        methods = {"PPO": ("ppo", 16), "GRPO": ("grpo", None)}
        return [
            make_plan(environment, name, arguments.training_keys, label=label, num_steps=num_steps, **sizes)
            for label, (name, num_steps) in methods.items()
        ]

    run_suite("gymnax_suite", arguments, [CATCH], plans, HEADER, CELLS)


def entry(ppo, grpo, algorithm="grpo", steps=1000):
    curve = {"steps": [10, 20], "mean": [0.0, 1.0], "low": [0.0, 0.5], "high": [0.0, 1.5]}
    rest = {"core_seconds": 7.0, "steps_per_second": 2000.0, "curve": curve}
    runs = {
        label: {"algorithm": name, "iqm": value, "ci95": [value - 1, value + 1]} | rest
        for label, value, name in (("PPO", ppo, "ppo"), ("GRPO", grpo, algorithm))
        if value is not None
    }
    return {"steps": steps, "random": 0.25, "num_seeds": 2, "hardware": "", "runs": runs}


def test_the_suites_table_says_which_goals_are_missed(tmp_path):
    results = {"Pendulum-v1": entry(-240.0, -500.0, "grpo_return_to_go"), "Acrobot-v1": entry(-95.0, -91.0)}
    write_comparison(results, tmp_path, HEADER, CELLS)
    assert json.loads((tmp_path / "summary.json").read_text()) == results
    rows = [CELLS(name, each) for name, each in results.items()]
    assert [dict(zip(HEADER, row, strict=True))["goal"] for row in rows] == ["-250", "-90 (missed)"]
    assert {"-240 [-241, -239]", "-500 [-501, -499] `grpo_return_to_go`", "0.25", "-130", "7 s"} < set(rows[0])
    assert (tmp_path / "learning_curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_method_of_a_suite_runs_beside_the_results_of_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(suite_study, "Study", Trained)
    earlier = entry(1.0, None, steps=128)
    write_comparison({CATCH: earlier}, tmp_path, HEADER, CELLS)
    arguments = gymnax_suite.Arguments(methods=("GRPO",), num_seeds=2, out=tmp_path)
    run_catch(arguments)
    found = read_results(tmp_path)[CATCH]
    assert list(found["runs"]) == ["PPO", "GRPO"] and found["runs"]["PPO"] == earlier["runs"]["PPO"]
    run_catch(arguments)
    assert read_results(tmp_path)[CATCH] == found, "the folder has all of it"
    for changed, message in (
        ({"num_seeds": 3}, "128 steps and 2 seeds .* of 128 and 3"),
        ({"methods": ("GRPU",)}, "unknown method 'GRPU'.*GRPO"),
    ):
        with pytest.raises(ConfigError, match=message):
            run_catch(dataclasses.replace(arguments, environments=(CATCH,), **changed))


def test_what_cannot_run_is_found_before_anything_runs(tmp_path, capsys):
    def plan(environment):
        raise ConfigError(f"{environment} needs a package")

    with pytest.raises(ConfigError, match="none of the environments can be made"):
        run_suite("suites", suites.Arguments(out=tmp_path / "new"), ["some:task"], plan, suites.HEADER, suites.cells)
    assert capsys.readouterr().out == "left out: some:task needs a package\n"
    for text in ("", "{", "[]", '{"a:one": 3}'):
        (tmp_path / "summary.json").write_text(text)
        with pytest.raises(ConfigError, match=r"summary\.json .*give another --out"):
            suites.main(suites.Arguments(environments=(CATCH,), out=tmp_path))


def test_an_environment_without_settings_has_the_default_budget(tmp_path):
    plans = suites.plans(suites.Arguments(steps_factor=0.5, out=tmp_path), CATCH)
    assert {plan.hyperparams.total_steps for plan in plans} == {0.5 * Hyperparams().total_steps}

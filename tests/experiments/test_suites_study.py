"""Comparisons on many environments: what stays of earlier runs, and the tables."""

import json

import pytest

from experiments import gymnax_suite, suites
from experiments.harness.suite_study import run_suite, write_comparison
from grpo_jax.errors import ConfigError

HEADER, CELLS, CATCH = gymnax_suite.HEADER, gymnax_suite.cells, "Catch-bsuite"


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

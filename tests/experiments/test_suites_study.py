"""Comparisons on many environments: what stays of earlier runs, and the tables."""

import pytest

from experiments import suites
from experiments.harness.suite_study import run_suite
from grpo_jax.errors import ConfigError

CATCH = "Catch-bsuite"


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

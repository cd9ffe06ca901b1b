"""The table of environments: what is wrong with one is in its row."""

import json

import jax.numpy as jnp
import pytest
from probes import Probe

from experiments import environments, suites
from grpo_jax.environments.suites import SUITES
from grpo_jax.environments.tokens import make_task
from grpo_jax.errors import ConfigError


class Infinite(Probe):
    """Its rewards are not finite."""

    def step_env(self, key, state, action, params):
        observation, state, reward, terminated, info = super().step_env(key, state, action, params)
        return observation, state, reward * jnp.inf, terminated, info


class Suite:
    """Imports a package that is missing."""

    names = staticmethod(lambda: __import__("a_missing_package"))


def test_a_row_says_what_is_wrong(tmp_path, capsys):
    names = ("probes:Probe", "test_environment_table:Infinite", "probes:Missing")
    arguments = environments.Arguments(environments=names, num_envs=2, num_steps=7, out=tmp_path)
    environments.main(arguments)
    rows = json.loads((tmp_path / environments.SUMMARY).read_text())
    assert rows["probes:Probe"]["problem"] == "" and rows["probes:Probe"]["limit"] == 3
    assert rows["test_environment_table:Infinite"]["problem"] == "a reward is not finite"
    assert rows["probes:Missing"]["problem"].startswith("ConfigError: ")
    assert "1 of 3 environments have no problem" in capsys.readouterr().out
    assert (tmp_path / environments.TABLE).read_text().count("\n") == 5


def test_names_that_the_folder_has_are_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(environments, "all_names", lambda suites: ["a:one", "a:two"])
    monkeypatch.setattr(environments, "examine", lambda *_: {"problem": ""})
    (tmp_path / environments.SUMMARY).write_text(json.dumps({"a:one": {"problem": "known"}}))
    environments.main(environments.Arguments(out=tmp_path))
    assert json.loads((tmp_path / environments.SUMMARY).read_text())["a:one"] == {"problem": "known"}
    assert "[1/1] a:two: ok" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a:one": 3}'])
def test_results_that_cannot_be_read_are_found_before_anything_runs(text, tmp_path):
    (tmp_path / environments.SUMMARY).write_text(text)
    with pytest.raises(ConfigError, match=r"summary\.json .*give another --out"):
        environments.main(environments.Arguments(out=tmp_path))
    with pytest.raises(ConfigError, match=r"summary\.json .*give another --out"):
        suites.main(suites.Arguments(environments=("Catch-bsuite",), out=tmp_path))


def test_a_suite_that_is_not_installed_is_left_out_or_named(monkeypatch, capsys):
    monkeypatch.setattr(environments, "SUITES", {"some": Suite})
    monkeypatch.setattr(environments, "LISTED", ("some",))
    assert environments.all_names(()) == []
    assert "some is not installed, so it is left out" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"some is not installed: pip install '.\[some\]' in a clone"):
        environments.all_names(("some",))
    with pytest.raises(ValueError, match="unknown suite 'sone': did you mean 'some'"):
        environments.all_names(("sone",))


def test_every_suite_in_jax_lists_names_of_its_own():
    assert {suite for suite, make in SUITES.items() if "names" not in vars(make)} == {"tokens", "gymnasium", "envpool"}
    assert SUITES["tokens"] is make_task

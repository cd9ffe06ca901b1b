"""The table of environments: what is wrong with one is in its row."""

import json

import jax.numpy as jnp
import pytest
from probes import Probe

from experiments import environments


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
    environments.main(environments.Arguments(environments=names, num_envs=2, num_steps=7, out=tmp_path))
    rows = json.loads((tmp_path / environments.SUMMARY).read_text())
    assert rows["probes:Probe"]["problem"] == "" and rows["probes:Probe"]["limit"] == 3
    assert rows["test_environment_table:Infinite"]["problem"] == "a reward is not finite"
    assert rows["probes:Missing"]["problem"].startswith("ConfigError: ")
    assert "1 of 3 environments have no problem" in capsys.readouterr().out


def test_a_suite_that_is_not_installed_is_left_out_or_named(monkeypatch, capsys):
    monkeypatch.setattr(environments, "SUITES", {"some": Suite})
    monkeypatch.setattr(environments, "LISTED", ("some",))
    assert environments.all_names(()) == []
    assert "some is not installed, so it is left out" in capsys.readouterr().out
    for name, message in (("some", r"some is not installed: pip install '.\[some\]'"), ("sone", "did you mean 'some'")):
        with pytest.raises(ValueError, match=message):
            environments.all_names((name,))

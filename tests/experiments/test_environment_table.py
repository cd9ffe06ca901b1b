"""The table of environments: what is wrong with one is in its row."""

import json

import jax.numpy as jnp
from probes import Probe

from experiments import environments


class Infinite(Probe):
    """Its rewards are not finite."""

    def step_env(self, key, state, action, params):
        observation, state, reward, terminated, info = super().step_env(key, state, action, params)
        return observation, state, reward * jnp.inf, terminated, info


def test_a_row_says_what_is_wrong(tmp_path, capsys):
    infinite = f"{__name__}:Infinite"
    names = ("probes:Probe", infinite, "probes:Missing")
    environments.main(environments.Arguments(environments=names, num_envs=2, num_steps=7, out=tmp_path))
    rows = json.loads((tmp_path / environments.SUMMARY).read_text())
    assert rows["probes:Probe"]["problem"] == "" and rows["probes:Probe"]["limit"] == 3
    assert rows[infinite]["problem"] == "a reward is not finite"
    assert rows["probes:Missing"]["problem"].startswith("ConfigError: ")
    assert "1 of 3 environments have no problem" in capsys.readouterr().out

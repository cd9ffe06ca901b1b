"""The comparison with brax's own trainer, where brax is installed."""

import json

import pytest

from experiments import brax_speed


@pytest.mark.slow
def test_both_trainers_are_timed_in_turn(tmp_path, capsys):
    pytest.importorskip("brax")
    out = tmp_path / "speed.json"
    sizes = {"num_envs": 8, "num_steps": 8, "hidden_sizes": (8,), "iterations": 2, "repeats": 2}
    brax_speed.main(brax_speed.Arguments(task="fast", out=out, **sizes))
    rows = {row["implementation"]: row["steps_per_second"] for row in json.loads(out.read_text())["results"]}
    assert {*rows} == {"brax PPO", "PPO", "PPO, drawn"}
    assert all(len(rates) == 2 and min(rates) > 0 for rates in rows.values())
    assert "ratio" in capsys.readouterr().out


def test_minibatches_that_do_not_divide_the_environments_are_refused():
    with pytest.raises(ValueError, match="--num-minibatches must divide --num-envs"):
        brax_speed.main(brax_speed.Arguments(num_envs=6, num_minibatches=4))

"""Token tasks: accuracies along a run, warm starts, and the comparisons."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.commands import tokens
from grpo_jax.commands.harness import token_runs
from grpo_jax.commands.harness.study import RecordingArguments
from grpo_jax.errors import ConfigError
from grpo_jax.training.progress import initial_progress


def test_accuracies_go_on_where_a_checkpoint_was(tmp_path, monkeypatch):
    """Of 20 points of a run to 4000 tokens, one each 200: killed after 700, resumed from a checkpoint at 500."""
    plan = SimpleNamespace(
        label="grpo", config=SimpleNamespace(steps_per_iteration=100), hyperparams=SimpleNamespace(total_steps=4000)
    )

    def answers(config, params, key, *, greedy=False, **others):
        return SimpleNamespace(**dict.fromkeys(("correct", "well_formed"), jnp.full((4, 8), params)))

    monkeypatch.setattr(token_runs, "answer", answers)

    def watched(out, *steps):
        accuracies = token_runs.AccuracyCurves(out, jax.random.key(0))
        for step in steps:
            states = SimpleNamespace(params=jnp.array([step / 4000, 0.0]))
            ended_by = np.full(2, "total_steps" if step == 4000 else "")
            progress = initial_progress(states, 2)._replace(steps=np.array([step, step // 2]), ended_by=ended_by)
            accuracies(plan, progress, None)
        return (out / "accuracy.json").read_text()

    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = watched(tmp_path / "whole", *range(0, 4100, 100))
    assert [point["steps"][0] for point in json.loads(whole)["grpo"]] == list(range(0, 4001, 200))
    watched(tmp_path / "killed", *range(0, 800, 100))
    assert watched(tmp_path / "killed", *range(500, 4100, 100)) == whole
    assert watched(tmp_path / "killed", 4000) == whole


@pytest.mark.slow
def test_token_tasks_are_warmed_up_trained_and_shown(tmp_path, capsys):
    kept = tmp_path / "start.msgpack"
    out = tmp_path / "out"
    arguments = tokens.Arguments(
        task="sort-2",
        num_seeds=2,
        total_steps=3200,
        target=0.05,
        warm_start=kept,
        out=out,
        recording=RecordingArguments(checkpoint_every=1),
    )
    tokens.main(arguments)
    run = json.loads((out / "summary.json").read_text())["runs"][0]
    assert run["environment"] == "tokens:sort-2" and all(0 <= score <= 1 for score in run["final_return"]["per_seed"])
    curve = json.loads((out / "accuracy.json").read_text())["grpo"]
    assert [len(point["sampled"]) for point in curve] == [2] * 3 and curve[0]["steps"] == [0, 0]
    assert (out / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "after the warm start" in printed and "after training" in printed and "exact match" in printed

    before = kept.read_bytes()
    assert (out / "warm_start.msgpack").read_bytes() == before
    with pytest.raises(ConfigError, match="target is 0.5 here, and 0.05 in the warm start"):
        tokens.main(dataclasses.replace(arguments, target=0.5, out=tmp_path / "other"))
    tokens.main(dataclasses.replace(arguments, recording=RecordingArguments(checkpoint_every=1, resume=True)))
    assert kept.read_bytes() == before
    assert json.loads((out / "accuracy.json").read_text())["grpo"] == curve


@pytest.mark.slow
@pytest.mark.parametrize("plans", [tokens.comparison, tokens.reward_hacking, tokens.keeping_variety])
def test_comparisons_are_of_equal_samples(plans):
    made = plans(tokens.Arguments())
    assert len({plan.label for plan in made}) == len(made) >= 5
    assert len({plan.config.steps_per_iteration for plan in made}) == 1
    assert len({float(plan.hyperparams.total_steps) for plan in made}) == 1
    assert not any(plan.config.algorithm.start.auto_reset for plan in made)

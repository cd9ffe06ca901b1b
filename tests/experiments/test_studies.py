"""The studies, as small as they go; the whole of each is its results page."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest

from experiments import family, grpo_vs_ppo, published_cartpole
from grpo_jax.commands import train
from grpo_jax.sweeps.runs import Run
from grpo_jax.training.progress import RunResult


def test_every_script_can_be_imported():
    for package, module in (("grpo_jax.commands", train), ("experiments", family)):
        for path in sorted(Path(module.__file__).parent.glob("*.py")):
            importlib.import_module(f"{package}.{path.stem}")


@pytest.mark.slow
def test_the_main_job_compares_grpo_and_ppo(tmp_path, capsys):
    environments = ("Catch-bsuite",)
    arguments = grpo_vs_ppo.Arguments(environments=environments, num_seeds=2, total_steps=9000, out=tmp_path / "out")
    grpo_vs_ppo.main(arguments)
    runs = json.loads((tmp_path / "out" / "summary.json").read_text())["runs"]
    assert [run["algorithm"] for run in runs] == ["GRPO", "PPO"]
    assert all(max(run["environment_steps"]) <= run["hyperparams"]["total_steps"] == 9000 for run in runs)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert {line["run"] for line in lines} == {"GRPO on Catch-bsuite", "PPO on Catch-bsuite"}
    assert "Catch-bsuite" in capsys.readouterr().out


def test_the_last_episodes_are_weighted_by_iteration():
    counts = np.array([[4.0, 1.0], [4.0, 1.0], [2.0, 1.0], [0.0, np.nan]])
    returns = np.array([[1.0, 10.0], [2.0, 20.0], [5.0, 30.0], [np.nan, np.nan]])
    result = RunResult(
        None, {"episode/count": counts, "episode/return_mean": returns}, None, 0.0, 0.0, None, None, None
    )
    run = Run("", None, None, result, np.zeros(2), 0.0, 0.0)
    # Seed 0: the last 2 episodes are those of one iteration, the last 3 reach into the one before.
    np.testing.assert_allclose(published_cartpole.last_episodes(run, 2), [5.0, 25.0])
    np.testing.assert_allclose(published_cartpole.last_episodes(run, 3), [(2 * 5 + 4 * 2) / 6, 20.0])


@pytest.mark.slow
def test_the_published_comparison_runs(tmp_path, capsys):
    published_cartpole.main(published_cartpole.Arguments(num_episodes=20, num_seeds=2, out=tmp_path / "out"))
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [run["algorithm"][:3] for run in summary["runs"]] == ["(a)", "(b)", "(c)", "(c)", "(d)"]
    assert "417.8" in capsys.readouterr().out


@pytest.mark.slow
def test_the_family_runs(tmp_path, capsys):
    family.main(
        family.Arguments(algorithms=("grpo", "grpo_process"), num_seeds=2, total_steps=130_000, out=tmp_path / "out")
    )
    assert len(json.loads((tmp_path / "out" / "summary.json").read_text())["runs"]) == 2
    assert (tmp_path / "out" / "family.png").exists()
    assert "grpo_process: cannot learn" in capsys.readouterr().out

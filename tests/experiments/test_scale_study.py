"""Both ends of --scale: what is run, and that the page has its results."""

import json
from pathlib import Path

import pytest

from experiments import scale
from experiments.harness.suite_study import write_comparison
from experiments.harness.summaries import read_results

PAGE = Path(scale.__file__).parent / "results" / "scale"
SIZES = "num_envs", "num_steps", "num_minibatches", "learning_rate"


def test_the_candidates_have_as_many_environments():
    def sizes(label):
        fields = scale.fields_of("Breakout-MinAtar", scale.CANDIDATES[label], 1_000_000)
        return tuple(fields.get(name) for name in SIZES)

    assert sizes("square root") == (4096, 16, 8, 0.014)
    assert sizes("fourth root") == (4096, 16, 8, 8.4e-3)
    assert sizes("same rate") == (4096, 16, 8, 5e-3)
    assert sizes("square root, 4 × minibatches") == (4096, 16, 32, 7.1e-3)
    assert sizes("same rate, 4 × minibatches") == (4096, 16, 32, 5e-3)


def test_the_page_has_the_results(tmp_path):
    results, arguments = read_results(PAGE), scale.Arguments(out=tmp_path)
    write_comparison(results, tmp_path, scale.header(arguments), lambda *entry: scale.cells(arguments, *entry))
    scale.write_sizes(arguments)
    page = (PAGE / "README.md").read_text()
    for name in ("table.md", "sizes/table.md"):
        made = (tmp_path / name).read_text()
        assert made == (PAGE / name).read_text() and made in page, name
    assert list(results) == [name for name in scale.SUITE if name in results]
    assert all(entry["steps"] == scale.SUITE[name].steps and entry["num_seeds"] >= 5 for name, entry in results.items())


@pytest.mark.slow
def test_both_ends_are_trained(tmp_path, capsys):
    arguments = scale.Arguments(
        environments=("CartPole-v1",), methods=("PPO, cpu", "PPO, 4,096"), num_seeds=2, steps_factor=0.1, out=tmp_path
    )
    scale.main(arguments)
    runs = json.loads((tmp_path / "summary.json").read_text())["CartPole-v1"]["runs"]
    assert list(runs) == ["PPO, cpu", "PPO, 4,096"] and all(len(run["per_seed"]) == 2 for run in runs.values())
    assert (tmp_path / "sizes" / "table.md").exists() and "| CartPole-v1 | 100,000 |" in capsys.readouterr().out

"""Comparisons of runs: reading their folders, labels, tables and pictures."""

import json
from pathlib import Path

import numpy as np
import pytest

from grpo_jax.commands import plot
from grpo_jax.errors import ConfigError


def write_run(folder, *, returns, finals=None, label="grpo", environment="Catch-bsuite"):
    """A run of three iterations; `returns` are `[3, num_seeds]`, None where there is none."""
    folder.mkdir(exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        for i, row in enumerate(returns):
            steps = [100 * (i + 1)] * len(row)
            run = {"values": {"name": label}, "environment": environment}
            line = {"run": run, "iteration": i, "environment_steps": steps, "loss/policy": row}
            line |= {"episode/return_mean": row, "episode/count": [0.0 if each is None else 60.0 for each in row]}
            file.write(json.dumps(line) + "\n")
    path = folder / "summary.json"
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    if finals is not None:
        runs.append({"values": {"name": label}, "environment": environment, "final_return": {"per_seed": finals}})
        path.write_text(json.dumps({"runs": runs}))


@pytest.fixture
def folders(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    write_run(one, returns=[[0.0, None], [0.5, 0.1], [0.6, 0.2]], finals=[0.5, 0.25])
    write_run(two, returns=[[0.0, 0.0], [0.5, 0.5], [0.9, 0.9]], finals=[0.75, 0.5], label="ppo")
    write_run(two, returns=[[0.0, 0.0], [0.5, 0.5], [0.9, 0.8]], label="rloo on a, b")
    return one, two


def test_runs_are_read_with_what_is_missing_and_still_being_written(folders):
    with (folders[0] / "metrics.jsonl").open("a") as file:
        file.write('{"run": {"values": {"na')
    (run,) = plot.read_runs(folders[0])
    assert run.label == "grpo" and run.environment == "Catch-bsuite" and run.final_returns.tolist() == [0.5, 0.25]
    returns = run.chunk.metrics["episode/return_mean"]
    np.testing.assert_array_equal(returns, np.float32([[0.0, np.nan], [0.5, 0.1], [0.6, 0.2]]))
    assert run.chunk.steps[:, 0].tolist() == [100, 200, 300]
    labels = [run.label for run in plot.read_all(folders, "loss/policy")]
    assert labels == ["one", "two: ppo", "two: rloo on a, b"]


def test_a_path_with_brackets_is_printed_as_it_is(tmp_path, capsys, monkeypatch):
    """Folders of one name have that of the folder above in their labels."""
    monkeypatch.chdir(tmp_path)
    for folder in ("[red]a/grpo", "b/grpo", "b/ppo"):
        Path(folder).parent.mkdir(exist_ok=True)
        write_run(Path(folder), returns=[[0.0], [0.5], [0.6]])
    plot.main(plot.Arguments(runs=(*Path().glob("*/*"),), out=Path("[bold]:smile:")))
    printed = capsys.readouterr().out
    assert "Curves in [bold]:smile:/comparison.png" in printed and "[red]a/grpo" in printed
    assert "b/grpo" in printed and "b/ppo" in printed


def test_evaluations_are_compared_only_with_evaluations(folders):
    runs = plot.read_all(folders, "episode/return_mean")
    assert [*map(id, plot.final_returns(runs[:2]))] == [id(run.final_returns) for run in runs[:2]]
    np.testing.assert_allclose(plot.final_returns(runs), [[0.55, 0.15], [0.7, 0.7], [0.7, 0.65]], rtol=1e-6)


def test_they_are_drawn_and_tabled(folders, tmp_path, capsys):
    write_run(folders[0], returns=[[1.0], [2.0], [3.0]], finals=[3.0], label="grpo", environment="Acrobot-v1")
    plot.main(plot.Arguments(runs=folders, out=tmp_path / "new"))
    assert (tmp_path / "new" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "1 [1, 1]" in printed and "Acrobot-v1" in printed and "comparison.png" in printed


TABLES = {
    "markdown": "| Catch-bsuite | two: ppo | 0.7 [0.7, 0.7] | 1 [1, 1] | 2 | 300 |\n",
    "csv": "environment,run,return,return low,return high,P(better than the first),",
    "latex": "two: rloo on a, b & 0.675 [0.65, 0.7] & 1 [1, 1] & 2 & 300 \\\\\n\\bottomrule\n\\end{tabular}",
}


@pytest.mark.parametrize("form, part", TABLES.items(), ids=TABLES)
def test_the_table_alone_is_printed_in_other_formats(form, part, folders, tmp_path, capsys):
    plot.main(plot.Arguments(runs=folders, out=tmp_path / "curves.pdf", format=form))
    printed = capsys.readouterr().out
    assert part in printed and "Curves in" not in printed
    assert (tmp_path / "curves.pdf").read_bytes().startswith(b"%PDF")


def test_folders_without_a_run_are_reported(tmp_path, folders):
    with pytest.raises(ValueError, match="no folders given"):
        plot.main(plot.Arguments(runs=()))
    with pytest.raises(ValueError, match="there is no folder"):
        plot.read_runs(tmp_path / "nothing")
    with pytest.raises(ValueError, match="not the folder of a run: it has no metrics.jsonl"):
        plot.read_runs(tmp_path)
    with pytest.raises(ValueError, match="no metric 'return'; known: episode/count, episode/return_mean, loss/policy"):
        plot.read_runs(folders[0], "return")
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="no iteration in it yet"):
        plot.read_runs(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{", '{"runs": 3}', '{"runs": [3]}', '{"runs": [{"values": {}}]}', "[" * 9999])
def test_a_damaged_summary_is_named(text, tmp_path):
    write_run(tmp_path, returns=[[1.0]])
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(ConfigError, match=r"summary\.json (is damaged|cannot be read)"):
        plot.read_runs(tmp_path)
